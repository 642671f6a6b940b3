"""The table of docs/architecture.md's worked example is what the scheduler does."""

from pathlib import Path

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import SchedulerSettings

PAGE = Path(__file__).resolve().parents[2] / "docs/architecture.md"
NAMES = {1: "A", 2: "B", 3: "C"}
STATES = {1: "waiting", 2: "prefill", 3: "running"}
COLUMNS = ("cached", "computed", "planned", "known", "limit")


def kind_of(plan):
    chunks = len(plan.counts) - plan.decode_rows
    return "MIXED" if chunks and plan.decode_rows else "EXTEND" if chunks else "DECODE"


def rows_after(yard, step, plan):
    """The table's lines after one step."""
    table, memory = yard.scheduler.state.table, yard.scheduler.state.memory
    for number, name in NAMES.items():
        row = table.row_of(number)
        # A request that ends with the step has left the table; the plan still has its pool row.
        row_of_plan = plan.pool_rows.tolist().index(number - 1) if number - 1 in plan.pool_rows else None
        counts = "-" if row_of_plan is None else str(plan.counts[row_of_plan])
        shown = ["ended", *["-"] * len(COLUMNS)] if row is None else [STATES[int(table.state[row])]]
        shown += [] if row is None else [str(int(getattr(table, column)[row])) for column in COLUMNS]
        head = [f"{step} {kind_of(plan)}" if number == 1 else "", name, counts]
        pages = [f"{memory.allocator.available}", f"{memory.tree.total_pages}"] if number == 1 else ["", ""]
        yield "| " + " | ".join([*head, *shown, *pages]) + " |"


def test_the_table_is_what_happens():
    settings = SchedulerSettings(
        page_size=4, chunked_prefill_size=8, enable_mixed_chunk=True, max_running_requests=4, context_length=64
    )
    yard = Yard(settings, make_info(pages=16, page_size=4, rows=4))
    common = [11, 12, 13, 14]
    yard.submit([*common, 15, 16], max_new=3)
    yard.submit([*common, 17, 18, 19, 20, 21, 22, 23, 24], max_new=2)
    yard.submit([31, 32, 33], max_new=2)
    lines = []
    for step in range(1, 5):
        assert yard.launch()
        yard.commit()
        lines += rows_after(yard, step, yard.plans[-1])
    assert not yard.launch()
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8"), "docs/architecture.md must say:\n" + "\n".join(lines)
