"""KV pages: the prefix tree, the free pages and the page table of admitted requests."""

from tokenyard.cache.allocator import OutOfPages, PageAllocator
from tokenyard.cache.eviction import EVICTION_POLICIES
from tokenyard.cache.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, block_hashes, root_hash
from tokenyard.cache.no_cache import NoCache
from tokenyard.cache.radix_cache import InsertResult, MatchResult, RadixCache, make_key
from tokenyard.cache.req_to_token import OutOfRows, ReqToTokenPool
from tokenyard.cache.tree_node import TreeNode

__all__ = [
    "EVICTION_POLICIES",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "InsertResult",
    "KvEvent",
    "MatchResult",
    "NoCache",
    "OutOfPages",
    "OutOfRows",
    "PageAllocator",
    "RadixCache",
    "ReqToTokenPool",
    "TreeNode",
    "block_hashes",
    "make_key",
    "root_hash",
]
