"""Keys of tenants from a file: what they open, what they limit, and what is counted of them."""

import asyncio
import logging
import os
from hashlib import sha256

import pytest
import yaml

from tests.router.fakes import FakeWorker, answer, routing
from tokenyard.base import ConfigError
from tokenyard.router.api_keys import read_keys
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.gpu_seconds import EngineCost, TenantUsage
from tokenyard.routing.tenant_limits import KeyGrant, KeyUsage

S = 10**9
TERMS = {"step_ms": 1.0, "floor_ms": 10.0, "dense_ms": 2.0, "token_ms": 0.1, "context_ms": 0.01, "area_ms": 0.0}
COST = {"terms": TERMS | {"row_ms": 0.5}, "devices": 2, "origin": "measured", "error": 0.1}
ADMIN = ["Authorization: Bearer boss"]


def entry(key, tenant="acme", **fields):
    return {"sha256": sha256(key.encode()).hexdigest(), "tenant": tenant, **fields}


def write(path, *entries):
    text = yaml.safe_dump({"keys": list(entries)})
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)
    return str(path)


@pytest.mark.parametrize(
    "report",
    [
        None,
        3,
        {},
        COST | {"terms": {"step_ms": 1.0}},
        COST | {"terms": TERMS | {"step_ms": -1.0}},
        COST | {"devices": 0},
        COST | {"devices": True},
        COST | {"origin": ""},
    ],
)
def test_gpu_seconds_of_an_engine_without_a_known_cost_model_are_unknown(report):
    assert EngineCost.from_report(report) is None
    used, cost = TenantUsage(), EngineCost.from_report(COST)
    used.add(12, 4, 30, None, 1)
    assert used.row() | {"gpu_seconds": None, "cost_model": "unknown", "unknown_gpu_requests": 1} == used.row()
    used.add(12, 4, 30, cost, 4)
    assert used.row()["gpu_seconds"] == pytest.approx(2 * (0.8 + 30 * (11 / 4 + 0.77)) / 1000)
    assert used.row()["unknown_gpu_requests"] == 1


def bearer(key):
    return [f"Authorization: Bearer {key}"]


async def usage(asked, writer):
    writer.write(answer({"usage": {"prompt_tokens": 12, "completion_tokens": 30, "cached_tokens": 4}}))


def run(coroutine):
    asyncio.run(coroutine)


class TestLimits:
    def test_a_bucket_starts_full_and_refills_steadily(self):
        key = KeyUsage(KeyGrant("a", requests_per_minute=2))
        assert [key.admit(1, 1), key.admit(1, 2)] == ["", ""]
        assert key.admit(1, 3) == "2 requests a minute"
        assert key.admit(1, 29 * S) == "2 requests a minute"
        assert key.admit(1, 31 * S) == ""
        # A long pause gives one minute's worth, not more.
        assert [key.admit(1, 1000 * S) for _ in range(3)] == ["", "", "2 requests a minute"]

    def test_answers_overdraw_the_tokens_and_hold_the_next_request_back(self):
        key = KeyUsage(KeyGrant("a", tokens_per_minute=60))
        assert key.admit(10, 1) == ""
        key.ended(80)
        assert key.admit(1, 2) == "60 tokens a minute"
        assert key.admit(1, 29 * S) == "60 tokens a minute"
        assert key.admit(1, 32 * S) == ""

    def test_a_refused_request_counts_against_nothing(self):
        key = KeyUsage(KeyGrant("a", requests_per_minute=5, max_open_requests=1))
        assert key.admit(1, 1) == ""
        assert {key.admit(1, 2) for _ in range(9)} == {"1 open requests"}
        key.ended(0)
        assert key.admit(1, 3) == ""


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([3], "key 1"),
        ([{"tenant": "a"}], "sha256sum"),
        ([{"sha256": "x" * 64, "tenant": "a"}], "sha256sum"),
        ([entry("k", "")], "tenant"),
        ([entry("k"), entry("k")], "key 2"),
        ([entry("k", quota=3)], "quota"),
        ([entry("k", expires="soon")], "expires"),
        ([entry("k", requests_per_minute=-1)], "requests_per_minute"),
        ([entry("k", models="m")], "models"),
        ([entry("k", max_priority=1.5)], "max_priority"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(entries, word, tmp_path):
    with pytest.raises(ConfigError, match=word):
        read_keys(write(tmp_path / "keys.yaml", *entries))


def test_keys_need_an_admin_key_beside_them():
    with pytest.raises(ConfigError, match="--admin-api-key"):
        RouterSettings(keys_file="keys.yaml")


def test_what_a_tenants_key_opens_and_counts(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = write(
        tmp_path / "keys.yaml",
        entry("ka", "acme", models=["m"], max_priority=0, requests_per_minute=3),
        entry("old", "acme", expires="2020-01-01"),
    )

    async def main():
        async with (
            FakeWorker(on_request=usage, info={"cost_model": COST}) as worker,
            routing(worker, keys_file=path, admin_api_key="boss", worker_api_key="fleet") as (_, client),
        ):
            for headers, code in (
                ([], "invalid_api_key"),
                (bearer("x"), "invalid_api_key"),
                (bearer("old"), "expired_api_key"),
            ):
                got = await client.complete(model="m", headers=headers)
                assert (got.status, got.error) == (401, code)
            for fields in ({"model": "n"}, {}, {"model": "m", "lora_path": "x"}, {"model": "m", "priority": 5}):
                got = await client.complete(headers=bearer("ka"), **fields)
                assert (got.status, got.error) == (403, "not_allowed")
            got = await client.complete(model="m", headers=[*bearer("ka"), "X-Priority: high"])
            assert got.error == "not_allowed"
            assert worker.asked == []
            for _ in range(3):
                assert (await client.complete(model="m", tenant="boss", headers=["X-Api-Key: ka"])).status == 200
            got = await client.complete(model="m", headers=bearer("ka"))
            assert (got.status, got.error) == (429, "tenant_limit")
            assert {asked.headers["x-tokenyard-tenant"] for asked in worker.asked} == {"acme"}
            assert {asked.headers["authorization"] for asked in worker.asked} == {"Bearer fleet"}
            assert (await client.ask("GET", "/v1/models", headers=bearer("ka"))).status == 200
            assert (await client.ask("GET", "/v1/models")).status == 401
            for method, way in (
                *(
                    ("POST", "/v1/scheduler"),
                    ("GET", "/v1/live"),
                    ("PATCH", "/v1/requests/r"),
                    ("POST", "/flush_cache"),
                ),
                *(("GET", "/workers"), ("GET", "/usage"), ("POST", "/abort_request"), ("POST", "/pause_generation")),
            ):
                assert (await client.ask(method, way, b"{}", bearer("ka"))).status == 401, way
            row = {"tenant": "acme", "model": "m", "requests": 3, "prompt_tokens": 36, "cached_tokens": 12}
            got = await client.ask("GET", "/usage", headers=ADMIN)
            # 3 * 2 devices * (8 tokens * 0.1 ms + 30 steps * (1 + 10 + 0.5 + 27 tokens * 0.01) ms)
            row |= {"answer_tokens": 90, "gpu_seconds": 2.1234, "unknown_gpu_requests": 0}
            assert got.json == {"usage": [{**row, "cost_model": "measured", "step_time_error": 0.1}]}
            table = (await client.ask("GET", "/usage?format=csv", headers=ADMIN)).body.decode().splitlines()
            assert table[1] == "acme,m,3,36,12,90,2.1234,0,measured,0.1"
            text = (await client.ask("GET", "/metrics")).body.decode()
            assert 'tokenyard_router_tenant_answer_tokens_total{tenant="acme",model="m"} 90' in text
            assert 'tokenyard_router_tenant_gpu_seconds_total{tenant="acme",model="m"} 2.1234' in text
            assert 'tokenyard_router_tenant_limited_total{tenant="acme"} 1' in text
            await client.ask("POST", "/flush_cache", headers=ADMIN)

    run(main())
    audited = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Control:")]
    assert len(audited) == 1
    assert "POST /flush_cache" in audited[0]
    assert "from 127.0.0.1" in audited[0]


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, entry("ka"))

    async def main():
        async with (
            FakeWorker() as worker,
            routing(worker, keys_file=str(path), admin_api_key="boss") as (_, client),
        ):

            async def opens(key, wanted):
                async with asyncio.timeout(5):
                    while ((await client.complete(headers=bearer(key))).status == 200) != wanted:
                        await asyncio.sleep(0.02)

            await opens("ka", True)
            write(path, entry("kb"))
            await opens("kb", True)
            await opens("ka", False)
            path.write_text("keys: 3")
            await asyncio.sleep(0.1)
            await opens("kb", True)

    run(main())
