"""Drives the scheduler with an executor (the mock one by default), without processes or clocks; watches every step."""

from collections import deque

import numpy as np

from tokenyard.base import (
    Executor,
    ExecutorInfo,
    Finish,
    Request,
    SamplingParams,
    SchedulerSettings,
    StateGroup,
    StepPlan,
    Submit,
    WindowGroup,
)
from tokenyard.executor.mock import FixedStepCost, MockExecutor
from tokenyard.scheduler import Scheduler

STEP_NS = 1_000_000


def make_info(
    pages: int = 64,
    page_size: int = 1,
    rows: int = 8,
    context: int = 64,
    windows: WindowGroup | None = None,
    states: StateGroup | None = None,
) -> ExecutorInfo:
    return ExecutorInfo(
        model="mock",
        device="none",
        dtype="none",
        vocab_size=97,
        context_length=context,
        eos_token_ids=(2,),
        page_size=page_size,
        num_pages=pages,
        max_pool_rows=rows,
        windows=windows,
        states=states,
    )


class Yard:
    """One scheduler, one device, and what came out so far."""

    def __init__(
        self,
        settings: SchedulerSettings,
        info: ExecutorInfo,
        answer_tokens: tuple[int, int] | None = None,
        cost: object | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.scheduler = Scheduler(settings, info, cost)
        self.executor = executor or MockExecutor(info, FixedStepCost(0.001), sleep=False, answer_tokens=answer_tokens)
        self.now = 1
        self.tickets: deque = deque()
        self.reads: deque[dict[int, tuple[int, int]]] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.plans: list[StepPlan] = []
        self.next_number = 1

    def submit(self, prompt: list[int], max_new: int = 4, **fields) -> int:
        sampling = fields.pop("sampling", None) or SamplingParams(max_new_tokens=max_new, temperature=0.0)
        number = self.next_number
        self.next_number += sampling.n
        request = Request(number, f"r{number}", np.array(prompt, np.int32), sampling, **fields)
        self.apply(Submit(request))
        return number

    def apply(self, event) -> None:
        self.now += 1
        self.scheduler.apply(event, self.now)
        self._collect()

    def launch(self) -> bool:
        """Plan and launch one step; False if there was nothing to do."""
        self.now += 1
        plan = self.scheduler.plan(self.now)
        self._collect()
        if plan is None:
            return False
        self.plans.append(plan)
        self._check_pages(plan)
        self.tickets.append(self.executor.launch(plan))
        return True

    def commit(self) -> bool:
        """Commit the oldest step in flight; False if there is none."""
        if not self.tickets:
            return False
        self.now += STEP_NS
        result = self.executor.collect(self.tickets.popleft())
        self.reads.popleft()
        self.scheduler.commit(result, self.now)
        self._collect()
        return True

    def advance(self, depth: int = 1) -> bool:
        """One turn of the event loop: plans up to `depth`, and one commit. False if there was nothing to do."""
        while len(self.tickets) < depth and self.launch():
            pass
        return self.commit()

    def run(self, depth: int = 1, limit: int = 10_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(limit):
            if not self.advance(depth):
                return
        raise AssertionError("the scheduler does not come to rest")

    def check(self) -> None:
        """Every page has exactly one owner, every length is in order."""
        check_books(self.scheduler)
        memory = self.scheduler.state.memory
        if memory.windows is not None:
            memory.windows.check(self._window_users())
            assert 0 <= memory.pending_window_pages <= memory.windows.num_pages

    def _window_users(self) -> np.ndarray:
        """How many rows use the window page of each page, by what rows and those that have left hold now."""
        memory, table = self.scheduler.state.memory, self.scheduler.state.table
        users = np.zeros(memory.num_pages + 1, np.int32)
        seated = self.scheduler.state.admitted_rows()
        rows = list(zip(table.pool_row[seated].tolist(), table.held[seated].tolist(), strict=True))
        rows += [(release.pool_row, release.held) for release in memory.releases]
        for pool_row, held in rows:
            first = int(memory.windows.first[pool_row])
            np.add.at(users, memory.pool.page_table[pool_row, first : memory.pages_for(held)], 1)
        for _, pages in memory.pending_frees:
            users[pages[memory.windows.of[pages] > 0]] += 1
        return users

    def check_hits(self) -> None:
        """See the function `check_hits`."""
        check_hits(self.scheduler)

    def _collect(self) -> None:
        batch = self.scheduler.drain()
        for number, token in zip(batch.numbers.tolist(), batch.tokens.tolist(), strict=True):
            assert number not in self.finished, "a token after the end"
            self.tokens.setdefault(number, []).append(token)
        for finish in batch.finished:
            assert finish.number not in self.finished, "a request ended twice"
            self.finished[finish.number] = finish

    def _check_pages(self, plan: StepPlan) -> None:
        """No page is written while a plan in flight reads it for another row; remember what this plan reads."""
        size = self.scheduler.state.memory.page_size
        table = self.scheduler.state.memory.pool.page_table
        reads: dict[int, tuple[int, int]] = {}
        for index, pool_row in enumerate(plan.pool_rows.tolist()):
            owner = (pool_row, int(plan.epochs[index]))
            start, end = int(plan.starts[index]), int(plan.starts[index] + plan.counts[index])
            pages = table[pool_row, : -(-end // size)].tolist()
            for column, page in enumerate(pages):
                written = (column + 1) * size > start
                for earlier in self.reads:
                    clash = written and earlier.get(page, owner) != owner
                    assert not clash, f"page {page} is written while a plan in flight reads it"
                reads[page] = owner
        self.reads.append(reads)


def check_books(scheduler: Scheduler) -> None:
    """Every page has exactly one owner, every length is in order."""
    state = scheduler.state
    memory, table = state.memory, state.table
    seated = state.admitted_rows()
    table.check(seated)
    held = [memory.pages_for(int(tokens)) for tokens in table.held[seated]]
    private = sum(held) - int((table.cached[seated] // memory.page_size).sum())
    owned = memory.allocator.available + memory.tree.total_pages + private + memory.releasing_pages + memory.held_pages
    owned += memory.state_pages
    assert owned == memory.num_pages, f"{owned} of {memory.num_pages} pages have an owner"
    sure = table.planned[seated] - table.verifying[seated]
    drafts = sum(map(memory.pages_for, table.planned[seated].tolist())) - sum(map(memory.pages_for, sure.tolist()))
    assert memory.draft_pages == drafts
    running = state.running.rows
    assert (table.held[running] == table.planned[running]).all()
    assert len(state.waiting) + len(seated) == len(table)
    if memory.states is not None:
        memory.states.check(readers_of_states(scheduler))
    check_holders(scheduler)
    check_namespaces(scheduler)


def check_namespaces(scheduler: Scheduler) -> None:
    """Rows read KV and states of their own salt and adapter only, of which the device does not know the salt."""
    state = scheduler.state
    for row in state.admitted_rows().tolist() if state.memory.tree.enabled else ():
        node = state.table.request_state(row).node
        while node.parent is not None:
            node = node.parent
        assert node.namespace == state.table.request(row).namespace


def readers_of_states(scheduler: Scheduler) -> np.ndarray:
    """How many rows and stores are about to read the checkpoint of each page: rows that load KV behind one."""
    memory, table = scheduler.state.memory, scheduler.state.table
    readers = np.zeros(memory.num_pages + 1, np.int32)
    for row in scheduler.state.admitted_rows().tolist():
        cached, request_state = int(table.cached[row]), table.request_state(row)
        if request_state.fresh and cached and not request_state.state_loaded:
            readers[memory.pool.page_table[table.pool_row[row], cached // memory.page_size - 1]] += 1
    np.add.at(readers, memory.held_checkpoints, 1)
    return readers


def check_holders(scheduler: Scheduler) -> None:
    """What rows share, and what tenants hold of the tree, is what the pages in their page tables say."""
    state = scheduler.state
    if state.holders is None:
        return
    table, size = state.table, state.memory.page_size
    held = {
        row: set(state.memory.pool.page_table[table.pool_row[row], : table.cached[row] // size].tolist())
        for row in state.admitted_rows().tolist()
    }
    for row, pages in held.items():
        others = set().union(*(more for other, more in held.items() if other != row))
        assert table.shared[row] == size * len(pages & others)
    tenants = len(table.tenant_names())
    wanted = [set().union(*(held[row] for row in held if table.tenant[row] == tenant)) for tenant in range(tenants)]
    assert state.holders.held(tenants).tolist() == [size * len(pages) for pages in wanted]


def check_hits(scheduler: Scheduler) -> None:
    """The index of waiting rows, while there is one, says what matching would say, and weighs the tree right."""
    state = scheduler.state
    table, index = state.table, state.waiting_index
    if not index.active:
        return
    waiting = state.waiting.rows.tolist()
    for row in waiting:
        ids = table.request_state(row).known_ids[: table.usable_tokens(row)]
        assert table.matchable[row] == hit_by_definition(state.memory, ids, table.request(row).namespace)
    assert index.forest.weight == len(waiting)
    assert sorted(check_branch(index.forest)) == sorted(waiting)


def hit_by_definition(memory, ids, namespace: str) -> int:
    """The longest prefix of `ids` in whole pages that the tree has, with window pages for what the token behind it
    sees, or a checkpoint of recurrent states where it ends; every length is tried.
    """
    size, windows, states, present = memory.page_size, memory.windows, memory.states, []
    runs = [ids[start : start + size].tobytes() for start in range(0, len(ids) - size + 1, size)]
    node = next((root for root in memory.tree.roots() if root.namespace == namespace), None)
    while node is not None and len(present) < len(runs):
        node = next((child for first, child in node.children.items() if first == runs[len(present)]), None)
        for place, page in enumerate([] if node is None else node.pages.tolist()):
            if len(present) == len(runs) or node.key[4 * size * place :][: 4 * size] != runs[len(present)]:
                node = None
                break
            present.append(page)
    for end in range(len(present), 0, -1):
        if states is not None:
            if states.of[present[end - 1]]:
                return end * size
            continue
        seen = 0 if windows is None else max(end * size - (windows.window - 1), 0) // size
        if windows is None or all(windows.of[present[place]] for place in range(seen, end)):
            return end * size
    return 0


def check_branch(top) -> list[int]:
    """Assert that each branch weighs what stands at it and below, heaviest child first; return all rows."""
    rows, stack = [], [top]
    while stack:
        branch = stack.pop()
        children = list(branch.heaviest_first())
        assert branch.weight == len(branch.rows()) + sum(child.weight for child in children)
        assert branch.own == len(branch.rows())
        assert [(-child.weight, child.birth) for child in children] == sorted(
            (-child.weight, child.birth) for child in children
        )
        assert all(child.weight for child in children)
        rows += branch.rows()
        stack += children
    return rows
