"""Owners of KV pages: the prefix tree, the free pages and the rows of running requests."""

from tokenyard.cache.allocator import OutOfPages, PageAllocator
from tokenyard.cache.eviction import EVICTION_POLICIES
from tokenyard.cache.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, block_hashes, root_hash
from tokenyard.cache.no_cache import NoCache
from tokenyard.cache.node import Node
from tokenyard.cache.radix import Insert, Match, RadixCache, make_key
from tokenyard.cache.req_to_token import OutOfRows, ReqToTokenPool

__all__ = [
    "EVICTION_POLICIES",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "Insert",
    "KvEvent",
    "Match",
    "NoCache",
    "Node",
    "OutOfPages",
    "OutOfRows",
    "PageAllocator",
    "RadixCache",
    "ReqToTokenPool",
    "block_hashes",
    "make_key",
    "root_hash",
]
