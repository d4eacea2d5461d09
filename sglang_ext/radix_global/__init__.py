"""The radix tree of prefixes and their holders, shared by engine and router."""

from sglang_ext.keys import decode_tokens, encode_tokens
from sglang_ext.radix_global.eviction import POLICIES, EvictionPolicy, policy_by_name
from sglang_ext.radix_global.invariants import TreeInvariantError
from sglang_ext.radix_global.node import Evicted, InsertResult, Match, Node
from sglang_ext.radix_global.placement import Holder
from sglang_ext.radix_global.tree import RadixTree

__all__ = [
    "POLICIES",
    "Evicted",
    "EvictionPolicy",
    "Holder",
    "InsertResult",
    "Match",
    "Node",
    "RadixTree",
    "TreeInvariantError",
    "decode_tokens",
    "encode_tokens",
    "policy_by_name",
]
