"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose schedulers count table entries.

A file ``NAME.ask`` in its folder (`hooked_server`) is answered by ``NAME.sizes``: entries of each table of
SGLang and of sglang_ext in a scheduler's process, and objects of each of their classes, as JSON. While there
is a file ``leak``, the cache keeps each name that a prompt comes with, as a faulty table would.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hooked_server import serve

PACKAGES = ("sglang_ext", "sglang")


def is_theirs(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in PACKAGES


def entries(value: Any) -> int:
    """How many entries a table has, and the tables in it; 0 of another value, and of a table with a limit."""
    if isinstance(value, functools._lru_cache_wrapper):
        about = value.cache_info()
        return about.currsize if about.maxsize is None else 0
    if not isinstance(value, dict | list | set | deque) or (isinstance(value, deque) and value.maxlen):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return len(value) + sum(len(each) for each in inner if isinstance(each, dict | list | set | deque))


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, by name: from its dictionary, from slots, and from a compiled class."""
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        for name in {*names, *kind.__dict__.get("__mypyc_attrs__", ())} - {"__dict__", "__weakref__"}:
            try:
                yield name, getattr(value, name)
            except AttributeError:
                continue


def sizes() -> dict[str, int]:
    """Entries of each table by class and attribute, or by module and name; objects of each class."""
    gc.unfreeze()
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if is_theirs(kind.__module__):
            place = f"{kind.__module__}.{kind.__qualname__}"
            found[place] += 1
            for name, value in attributes(each):
                found[f"{place}.{name}"] += entries(value)
    for name, module in list(sys.modules.items()):
        if is_theirs(name):
            for inner, value in list(vars(module).items()):
                found[f"{name}.{inner}"] += entries(value)
    return {place: count for place, count in found.items() if count}


def count(folder: Path) -> None:
    """Look for files in each pass of this process's scheduler."""
    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    events, match = GlobalRadixCache.check_hicache_events, GlobalRadixCache.match_prefix

    def check_hicache_events(self: GlobalRadixCache) -> None:
        for path in folder.glob("*.ask"):
            path.unlink()
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(sizes()))
            unfinished.rename(path.with_suffix(".sizes"))
        events(self)

    def match_prefix(self: GlobalRadixCache, params: Any) -> Any:
        if (folder / "leak").exists():
            vars(self).setdefault("_leaked", {})[params.key.extra_key] = True
        return match(self, params)

    GlobalRadixCache.check_hicache_events = check_hicache_events  # type: ignore[method-assign]
    GlobalRadixCache.match_prefix = match_prefix  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(count)
