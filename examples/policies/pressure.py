"""Order in which announced sessions lose their KV: the session with the latest hint first.

    sglang-ext serve --kv-eviction-policy lru,pressure=pressure:newest_first …

Sessions announced earlier keep their promoted KV: a crowd of hints does not push out KV that is nearly due.
"""

from __future__ import annotations

from sglang_ext.engine.tiers.retention import Announced


def newest_first(session: Announced) -> tuple[float, ...]:
    """Lowest priority, then the youngest hint."""
    return (session.priority, -session.number)
