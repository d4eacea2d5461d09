"""The garbage collector of a router's process: told what lives as long as the process does.

Python looks at every object that there is, now and then, for cycles. A tokenizer's libraries leave half a
million objects behind that never become garbage; looking at them takes 100 ms and more, in which no request
goes on.
"""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 50)
"""Objects until the youngest are looked at, and passes until the older and the oldest are. Requests leave
hardly any cycles behind."""


def settle() -> None:
    """Never look again at what is there now. For a process that is a router and nothing else, once it has
    loaded what it needs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
