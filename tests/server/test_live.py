"""The live page's files and its stream of events."""

import json
import time

import pytest

from tokenyard.server.native.live_feed import PERIOD_S, ROW, kv_stores_of
from tokenyard.ui.files import SERVER_PAGE


def events(server, count, **options):
    found = []
    with server.client.stream("GET", "/v1/live", **options) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == count:
                return found
    return found


def test_the_page_and_its_files_are_there_with_a_strict_policy(server):
    for path, (_, content_type) in SERVER_PAGE.items():
        answer = server.client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == content_type
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert server.client.get("/ui/../server.py").status_code == 404


def test_an_event_has_what_the_page_shows(server):
    server.state.metrics.count("slo_requests", 4, "normal", "yes")
    first, second = events(server, 2)
    assert first["server"]["model"] == "fake"
    assert first["rows"] == [["first", *(server_row()[name] for name in ROW)]]
    assert first["bins"] == [[7, 2, 64, 6, 9.0, 6.0, 8.0]]
    assert first["slo"]["normal"] == [4, 0]
    assert first["budget_ms"] == 50.0
    assert first["prefixes"][0]["head"] == [1, 2, 3]
    assert "server" not in second
    assert second["counts"] == {"waiting": 2, "loading": 0, "prefilling": 0, "running": 3}


def server_row():
    from tests.server.fake import VIEW

    return VIEW["rows"][0]


def test_schedulers_are_not_polled_without_a_client(server):
    events(server, 3)
    deadline = time.monotonic() + 5
    asked = -1
    while asked != len(server.manager.watched):
        assert time.monotonic() < deadline
        asked = len(server.manager.watched)
        time.sleep(3 * PERIOD_S)
    assert events(server, 1)[0]["kv"]["total"] == 100


def test_what_requests_do_is_for_the_admin_key_and_the_files_for_all(start):
    server = start(api_key="user", admin_api_key="admin")
    assert server.client.get("/").status_code == 200
    for key in ("", "user"):
        refused = server.client.get("/v1/live", headers={"authorization": f"Bearer {key}"} if key else {})
        assert refused.status_code == 401
    assert events(server, 1, headers={"authorization": "Bearer admin"})[0]["phase"] == "ready"


@pytest.mark.parametrize("drained", [False, True])
def test_the_stream_reports_loading_and_ends_with_the_server(start, drained):
    server = start(loading=not drained)
    if drained:
        server.state.start_draining()
        assert [one["phase"] for one in events(server, 9)] == ["drained", "drained"]
    else:
        assert events(server, 1)[0]["phase"] == "loading"


def test_stores_below_the_device_are_added_up_by_kind():
    rank = {"backend": "disk", "blocks": 3, "block_tokens": 64, "stored_bytes": 4096, "loading": 1}
    found = kv_stores_of({"rank 0": rank, "rank 1": rank | {"blocks": 1, "loading": 0}})
    assert found == {"disk": {"tokens": 256, "bytes": 8192, "loading": 1}}
    assert kv_stores_of({}) == {}
