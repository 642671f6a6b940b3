"""What a page sees of a scheduler."""

from dataclasses import asdict

import msgspec

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import SchedulerSettings
from tokenyard.policy.service_levels import HIGH, NORMAL
from tokenyard.scheduler.live_view import MAX_ROWS


def yard(**settings):
    made = SchedulerSettings(page_size=1, chunked_prefill_size=16, max_running_requests=4, **settings)
    return Yard(made, make_info(pages=64, rows=4))


def view_of(one, prefixes=True):
    seen = one.scheduler.live_view(one.now, prefixes=prefixes)
    assert msgspec.json.decode(msgspec.json.encode(asdict(seen))) == asdict(seen)
    kv = seen.kv
    assert kv.rows + kv.shared + kv.cached + kv.held + kv.free == kv.total == 64
    return seen


def test_groups_count_all_rows_by_state_level_and_tenant():
    one = yard()
    for place in range(70):
        one.submit([place + 3] * 4, max_new=4, tenant="acme" if place % 2 else "", service_class="high")
    one.submit([9] * 4, max_new=4)
    seen = view_of(one)
    counted = {(group.state, group.level, group.tenant): group.requests for group in seen.groups}
    assert counted == {("waiting", HIGH, "acme"): 35, ("waiting", HIGH, ""): 35, ("waiting", NORMAL, ""): 1}
    assert len(seen.rows) == MAX_ROWS
    assert seen.rows[1].tenant == "acme"
    one.advance()
    states = {row.state for row in view_of(one).rows}
    assert states == {"waiting", "running"}


def test_the_runs_that_save_most_come_first():
    one = yard()
    for place in range(6):
        one.submit([*range(3, 15), 20 + place], max_new=1)
        one.run()
    for _ in range(2):
        one.submit([40, 41, 42, 43], max_new=1)
        one.run()
    first, second, *_ = view_of(one).prefixes
    assert (first.begin, first.tokens, first.hits, first.head) == (0, 12, 5, list(range(3, 15)))
    assert (second.begin, second.hits) == (0, 1)
    assert view_of(one, prefixes=False).prefixes is None


def test_without_a_tree_there_are_no_prefixes():
    one = yard(disable_radix_cache=True)
    one.submit([3, 4, 5])
    one.advance()
    assert view_of(one).prefixes == []
