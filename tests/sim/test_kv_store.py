"""Tiers below the device in virtual time: stored KV is loaded where that pays, and all pages are free at the end."""

import json

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import ConfigError
from tokenyard.cli.main import main
from tokenyard.sim.fleet.fleet_settings import Fault, Fleet, ProcessStop
from tokenyard.sim.fleet.simulation import Simulation
from tokenyard.sim.kv.block_store import ChannelJob, IoChannel, SimBlockStore
from tokenyard.sim.kv.disagg_settings import DisaggSettings, KvStoreSettings
from tokenyard.sim.traces.prompt_ids import SegmentContent
from tokenyard.sim.traces.synthetic import synthetic

CACHED = {"disable_radix_cache": False, "page_size": 16}
LARGE = KvStoreSettings(disk_gb=1000.0, write_mb_s=0.0)


def served(traffic, kv_store, **changes):
    """The outcome; every answer is whole, and all pages are free at the end."""
    run = Simulation(traffic, setup(settings=CACHED, kv_store=kv_store, **changes))
    for _ in run.until_end():
        pass
    outcome = run.outcome()
    assert outcome.served.all()
    assert (outcome.completion_tokens == traffic.output_tokens).all()
    for unit in run.units:
        memory = unit.replica.scheduler.state.memory
        assert not memory.holds
        assert unit.replica.scheduler.flush(unit.replica.now)
        assert memory.allocator.available == memory.num_pages
    return outcome


def returning(prompts, tokens):
    """`prompts` long prompts, and each of them again when the pool has forgotten it."""
    streams = np.tile(np.arange(prompts), 2)
    content = SegmentContent(streams, np.full(2 * prompts, tokens, np.int32), np.arange(2 * prompts + 1))
    return workload(*((5.0 * i, tokens, 4) for i in range(2 * prompts)), content=content)


def test_a_long_prompt_evicted_from_the_pool_is_loaded_from_the_disk():
    traffic, pool = returning(4, 30_000), {"kv_pool_tokens": 40_000}
    without = served(traffic, None, **pool)
    with_disk = served(traffic, LARGE, **pool)
    again = slice(4, 8)
    assert (without.cached_tokens[again] == 0).all()
    assert (with_disk.cached_tokens[again] > 29_900).all()
    assert with_disk.ttft_s[again].max() < 0.75 * without.ttft_s[again].min()
    # A page cache in host memory is faster still.
    host = served(traffic, KvStoreSettings(host_gb=1000.0, disk_gb=0.0), **pool)
    assert host.ttft_s[again].max() < 0.2 * with_disk.ttft_s[again].min()
    assert host.kv_store.loaded_from_disk == 0


def test_short_prompts_are_computed_where_that_is_faster_than_the_disk():
    outcome = served(returning(8, 2000), LARGE, kv_pool_tokens=4000)
    assert outcome.kv_store.loaded == 0
    assert outcome.kv_store.recomputed == 8


def test_a_full_tier_evicts_the_least_recently_used():
    gb = 2.5 * 30_000 * 131_072 / 1e9
    outcome = served(returning(4, 30_000), KvStoreSettings(disk_gb=gb, write_mb_s=0.0), kv_pool_tokens=40_000)
    assert outcome.kv_store.evicted > 0
    assert (outcome.cached_tokens[4:] == 0).any()


@pytest.mark.parametrize(
    "kv_store",
    [
        KvStoreSettings(disk_gb=1000.0, write_mb_s=500.0),
        KvStoreSettings(host_gb=1000.0, disk_gb=0.0),
        KvStoreSettings(10.0, 1000.0),
    ],
)
def test_what_waits_to_be_stored_with_several_chunks_is_stored_once(kv_store):
    outcome = served(workload((0.0, 30_000, 4), (40.0, 30_000, 4)), kv_store)
    assert outcome.kv_store.stored == 2 * (30_003 // 64 * 64)


def test_the_wait_for_a_slow_disk_is_bounded():
    traffic, pool = returning(4, 30_000), {"kv_pool_tokens": 40_000}
    # Reading takes a second, and computing a little more.
    slow = KvStoreSettings(disk_gb=1000.0, write_mb_s=0.0, read_gb_s=3.9, timeout_s=0.5, timeout_per_1k_tokens_s=0.0)
    outcome = served(traffic, slow, **pool)
    assert (outcome.cached_tokens[4:] > 0).all()
    assert (outcome.cached_tokens[4:] < 20_000).all()
    eager = served(traffic, KvStoreSettings(disk_gb=1000.0, write_mb_s=0.0, prefetch_policy="best_effort"), **pool)
    assert (eager.cached_tokens[4:] == 0).all()


def test_a_second_hit_is_stored_where_the_policy_says_so():
    traffic = synthetic("multi-turn", 120, 2.0, seed=2)
    stored = {}
    for policy in ("write_through", "write_through_selective"):
        run = Simulation(traffic, setup(settings={**CACHED, "hicache_write_policy": policy}, kv_store=LARGE))
        for _ in run.until_end():
            pass
        stored[policy] = run.outcome().kv_store.stored
    assert 0 < stored["write_through_selective"] < stored["write_through"]


@pytest.mark.part(8)
@pytest.mark.parametrize(
    "changes",
    [
        {"fleet": Fleet(faults=(Fault(1.0, 0, 1.0),))},
        {"fleet": Fleet(stops=(ProcessStop(1.0, 1, 2.0),))},
        {"disagg": DisaggSettings(1, link_gbit=50.0)},
        {"disagg": DisaggSettings(1, mode="both"), "fleet": Fleet(faults=(Fault(1.0, 2, 1.0),))},
    ],
)
def test_tiers_go_with_fleets_faults_and_prefill_engines(changes):
    traffic = synthetic("multi-turn", 120, 4.0, seed=5)
    kv_store = KvStoreSettings(host_gb=20.0, disk_gb=100.0, write_mb_s=0.0)
    outcome = served(traffic, kv_store, replicas=2, kv_pool_tokens=20_000, **changes)
    assert outcome.kv_store.loaded > 0


def test_blocks_keep_the_beginnings_of_prompts_longest():
    blocks = SimBlockStore(3)
    for digest in (b"a", b"b", b"c"):
        blocks.put(digest)
    blocks.touch([b"a", b"b", b"c"])
    blocks.put(b"d")
    assert [digest in blocks for digest in (b"a", b"b", b"c", b"d")] == [True, True, False, True]


def test_a_channel_runs_one_job_at_a_time_and_reports_how_much_of_one_was_done():
    calls, done = [], []
    channel = IoChannel(lambda when, call: calls.append((when, call)))

    def job(name):
        return ChannelJob(lambda: 100, lambda part, seconds, now: done.append((name, part, seconds, now)))

    cut, waiting, whole = (job(name) for name in ("cut", "waiting", "whole"))
    for one in (cut, waiting, whole):
        channel.add(one, 0)
    calls += [(50, lambda now: channel.cancel(waiting, now)), (60, lambda now: channel.cancel(cut, now))]
    calls.append((70, lambda now: channel.cancel(cut, now)))
    while calls:
        calls.sort(key=lambda entry: entry[0])
        when, call = calls.pop(0)
        call(when)
    assert done == [("waiting", 0.0, 0.0, 50), ("cut", 0.6, 6e-8, 60), ("whole", 1.0, 1e-7, 160)]
    assert channel.busy_ns == 160


def test_the_command_reports_hits_in_the_kv_store(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = "simulate --synthetic multi-turn --limit 100 --request-rate 1 --max-total-tokens 20000"
    store = ["--enable-hierarchical-cache", "--hicache-size", "40"]
    assert main([*words.split(), *store, "--json", str(out)]) == 0
    assert "from the KV store" in capsys.readouterr().out
    numbers = json.loads(out.read_text())
    assert numbers["kv_store"]["hit_rate"] > 0.1
    assert numbers["tiers"] == numbers["kv_store"]
    assert main(["simulate", "--synthetic", "plain", "--limit", "5", "--hicache-size", "4"]) == 2
    assert "--enable-hierarchical-cache" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        KvStoreSettings(disk_gb=0.0)
