"""SGLang looks for attributes of its cache by name: ours has none of those names by accident."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

MEANT = {
    *("check_prefetch_progress", "hicache_storage_pass_prefix_keys", "is_backuped", "prefetch_from_storage"),
    *("disable", "get_last_hash_value", "is_root", "page_size", "req_to_token_pool", "sanity_check"),
    "token_to_kv_pool_allocator",
}
"""Attributes that SGLang looks for and we answer on purpose, beside its own interface of a cache."""


def looked_for(source: str) -> Iterator[str]:
    """The attributes of a ``tree_cache`` that a module of SGLang's uses or asks for by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "tree_cache":
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            owner, name = node.args[:2]
            if "tree_cache" in ast.unparse(owner) and isinstance(name, ast.Constant):
                yield str(name.value)


def test_no_name_of_ours_means_something_else_to_sglang() -> None:
    package = Path(sglang.__path__[0]) / "srt"
    names = {
        name
        for path in package.rglob("*.py")
        if "tree_cache" in (text := path.read_text("utf-8"))
        for name in looked_for(text)
    }
    cache = GlobalRadixCache.create_simulated()
    ours = {name for name in names if hasattr(cache, name) and not hasattr(BasePrefixCache, name)}
    assert ours == MEANT
