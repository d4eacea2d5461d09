"""Which announced session loses its KV first: the one whose hint was given last.

    sglang-ext serve --kv-pressure-policy pressure:newest_first …

Whoever announced first keeps what was brought up: a crowd of hints does not push out what is nearly due.
"""

from __future__ import annotations

from sglang_ext.engine.tiers.retention import Announced


def newest_first(session: Announced) -> tuple[float, ...]:
    """Lowest priority, then the youngest hint."""
    return (session.priority, -session.number)
