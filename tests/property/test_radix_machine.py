"""The radix tree against a naive model: a dict from every cached prefix, page by page, to its page id."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import examples
from tokenyard.cache import (
    EVICTION_POLICIES,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    PageAllocator,
    RadixCache,
    block_hashes,
    make_key,
    root_hash,
)
from tokenyard.cache.tree_node import TreeNode

NUM_PAGES = 60
NAMESPACES = st.sampled_from(["", "", "salt"])
# Pages differ in their last token (0, 1) or in their first (2), so that prefixes end inside pages too.
PAGE_KINDS = st.lists(st.integers(0, 2), max_size=7)
PICK = st.integers(0, 1000)

Prefix = tuple[int, ...]


class Shadow:
    """A listener that knows the nodes of the tree by hearsay alone."""

    def __init__(self):
        self.nodes = set()

    def inserted(self, parent, node):
        assert parent.parent is None or parent in self.nodes
        assert node.parent is parent
        self.nodes.add(node)

    def split(self, upper, lower):
        assert lower in self.nodes
        assert lower.parent is upper
        self.nodes.add(upper)

    def evicted(self, node):
        assert not node.children
        self.nodes.remove(node)


class RadixMachine(RuleBasedStateMachine):
    """`held[namespace]` maps a prefix, as the kinds of its pages, to the id of its last page."""

    page_size = 1

    @initialize(policy=st.sampled_from(sorted(EVICTION_POLICIES)))
    def start(self, policy):
        self.eviction_rank = EVICTION_POLICIES[policy]
        self.tree = RadixCache(self.page_size, policy, enable_kv_events=True)
        self.shadow = Shadow()
        self.tree.listeners.append(self.shadow)
        self.allocator = PageAllocator(NUM_PAGES)
        self.held: dict[str, dict[Prefix, int]] = {"": {}, "salt": {}}
        self.lock_ref: list[tuple[TreeNode, str, Prefix]] = []
        self.blocks: set[int] = set()

    def tokens(self, kinds, extra=0):
        """int32 token ids of these pages, and `extra` tokens of one page more."""
        pages = np.full((len(kinds) + 1, self.page_size), 7, np.int32)
        for page, kind in zip(pages, [*kinds, 1], strict=True):
            page[0 if kind == 2 else -1] = kind
        return pages.ravel()[: len(kinds) * self.page_size + extra]

    def known(self, namespace, kinds):
        """How many pages of this prefix the model holds."""
        held = self.held[namespace]
        return next((n for n in range(len(kinds), 0, -1) if tuple(kinds[:n]) in held), 0)

    def protected(self):
        """Every (namespace, prefix) on the path of a lock."""
        return {(name, prefix[:n]) for _, name, prefix in self.lock_ref for n in range(1, len(prefix) + 1)}

    def expect_pages(self, node, namespace, kinds):
        """The pages along `node` are the model's pages of `kinds`."""
        expected = [self.held[namespace][tuple(kinds[: n + 1])] for n in range(len(kinds))]
        assert node.depth_tokens == len(kinds) * self.page_size
        assert self.tree.pages(node).tolist() == expected

    def take(self, count):
        """Pages for an insert, evicting the shortfall; None if locks hold too many."""
        shortfall = count - self.allocator.available
        if shortfall > self.tree.evictable_pages:
            return None
        if shortfall > 0:
            self.expect_eviction(shortfall)
        return self.allocator.alloc(count)

    def expect_eviction(self, count):
        """Evict `count` pages: exactly so many go, none of them locked, and every prefix left still has its parent."""
        names = {page: (name, prefix) for name, held in self.held.items() for prefix, page in held.items()}
        gone = self.tree.evict(count).tolist()
        assert len(gone) == min(count, len(names) - len(self.protected()))
        for page in gone:
            name, prefix = names.pop(page)
            assert (name, prefix) not in self.protected()
            del self.held[name][prefix]
        for name, prefix in names.values():
            assert len(prefix) == 1 or prefix[:-1] in self.held[name]
        self.allocator.free(np.array(gone, np.int32))

    def remember(self, namespace, kinds, first, pages):
        """The tree now owns `pages` as those of `kinds` from page `first` on."""
        for position, page in enumerate(pages.tolist(), start=first):
            self.held[namespace][tuple(kinds[: position + 1])] = page

    @rule(namespace=NAMESPACES, kinds=PAGE_KINDS, priority=st.integers(-1, 2))
    def insert(self, namespace, kinds, priority):
        pages = self.take(len(kinds))
        if pages is None:
            return
        present = self.known(namespace, kinds)
        inserted = self.tree.insert(make_key(self.tokens(kinds)), pages, namespace, priority)
        assert inserted.present_tokens == present * self.page_size
        self.allocator.free(pages[:present])
        self.remember(namespace, kinds, present, pages[present:])
        self.expect_pages(inserted.node, namespace, kinds)

    @rule(
        namespace=NAMESPACES,
        kinds=PAGE_KINDS,
        extra=st.integers(0, 15),
        limit=st.none() | st.integers(-2, 120),
        lock=st.booleans(),
    )
    def match(self, namespace, kinds, extra, limit, lock):
        extra = min(extra, self.page_size - 1)
        key = make_key(self.tokens(kinds, extra))
        present = self.known(namespace, kinds)
        assert self.tree.peek(key, namespace) == present * self.page_size
        if limit is not None:
            present = max(0, min(present, limit // self.page_size))
        match = self.tree.match(key, namespace, limit)
        assert match.tokens == present * self.page_size
        self.expect_pages(match.node, namespace, kinds[:present])
        if lock:
            self.tree.lock(match.node)
            self.lock_ref.append((match.node, namespace, tuple(kinds[:present])))

    @precondition(lambda self: self.lock_ref)
    @rule(pick=PICK, kinds=PAGE_KINDS, priority=st.integers(-1, 2), move_lock=st.booleans())
    def extend(self, pick, kinds, priority, move_lock):
        index = pick % len(self.lock_ref)
        node, namespace, prefix = self.lock_ref[index]
        pages = self.take(len(kinds))
        if pages is None:
            return
        whole = [*prefix, *kinds]
        present = self.known(namespace, whole) - len(prefix)
        inserted = self.tree.extend(node, make_key(self.tokens(kinds)), pages, priority)
        assert inserted.present_tokens == present * self.page_size
        self.allocator.free(pages[:present])
        self.remember(namespace, whole, len(prefix) + present, pages[present:])
        self.expect_pages(inserted.node, namespace, whole)
        if move_lock:
            self.tree.lock(inserted.node)
            self.tree.unlock(node)
            self.lock_ref[index] = (inserted.node, namespace, tuple(whole))

    @precondition(lambda self: self.lock_ref)
    @rule(pick=PICK)
    def unlock(self, pick):
        self.tree.unlock(self.lock_ref.pop(pick % len(self.lock_ref))[0])

    @precondition(lambda self: self.lock_ref)
    @rule(pick=PICK)
    def record_hit(self, pick):
        self.tree.record_hit(self.lock_ref[pick % len(self.lock_ref)][0])

    @rule(count=st.integers(-1, 20))
    def evict(self, count):
        self.expect_eviction(max(count, 0))

    @precondition(lambda self: self.tree.evictable_pages)
    @rule()
    def evict_one(self):
        leaves = [node for node in self.shadow.nodes if not node.children and not node.locked]
        assert len({self.eviction_rank(node) for node in leaves}) == len(leaves), (
            "the order would be a matter of chance"
        )
        expected = min(leaves, key=self.eviction_rank).pages[-1]
        before = {page for held in self.held.values() for page in held.values()}
        self.expect_eviction(1)
        after = {page for held in self.held.values() for page in held.values()}
        assert before - after == {expected}

    @precondition(lambda self: self.lock_ref or self.tree.total_pages > NUM_PAGES // 2)
    @rule()
    def clear(self):
        if self.lock_ref:
            before = self.tree.total_pages
            try:
                self.tree.clear()
            except RuntimeError:
                assert self.tree.total_pages == before
                return
            raise AssertionError("cleared a tree with locks")
        self.allocator.free(self.tree.clear())
        self.held = {"": {}, "salt": {}}
        assert not self.shadow.nodes

    @rule()
    def drain(self):
        for event in self.tree.drain_events():
            if isinstance(event, BlocksStored):
                self.blocks.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                self.blocks.difference_update(event.hashes)
            else:
                assert isinstance(event, BlocksCleared)
                self.blocks.clear()
        expected = set()
        for name, held in self.held.items():
            for prefix in held:
                expected.add(block_hashes(make_key(self.tokens(prefix)), self.page_size, root_hash(name))[-1])
        assert self.blocks == expected

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        self.allocator.check()
        total = sum(len(held) for held in self.held.values())
        assert self.tree.total_pages == total
        assert self.tree.protected_pages == len(self.protected())
        assert self.allocator.available + total == NUM_PAGES
        assert sum(len(node.pages) for node in self.shadow.nodes) == total


class RadixMachineOfPages4(RadixMachine):
    page_size = 4


class RadixMachineOfPages16(RadixMachine):
    page_size = 16


TestRadixPages1 = RadixMachine.TestCase
TestRadixPages4 = RadixMachineOfPages4.TestCase
TestRadixPages16 = RadixMachineOfPages16.TestCase
TestRadixPages1.settings = TestRadixPages4.settings = TestRadixPages16.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
