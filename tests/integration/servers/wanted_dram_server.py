"""SGLang's server as ``sglang_ext.launch_server`` starts it, whose DRAM is wanted while it is loaded.

While there is a file ``wanted`` in its folder (`hooked_server`), all of DRAM that may be given up is given to
others between the moment at which a load is decided and its first copy, and is written over. On a CPU, a
scheduler gives nothing away in that time. If the file says ``unlocked``, blocks may be given up that are to
be loaded, as in sglang#30321.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hooked_server import serve

OTHERS = 0x3E
"""The bytes of others' blocks. Four of them are a float32 value of 0.19."""


def want_dram(folder: Path) -> None:
    """Look for the file at each load of this process's scheduler."""
    from sglang_ext.engine.tiers.dram_tier import DramTier

    load, loaded = DramTier.load, DramTier._loaded
    wanted, unlocked = folder / "wanted", set[int]()

    def give_away(tier: DramTier) -> None:
        places = tier.take(tier.n_blocks)
        tier._arena.blocks[places] = OTHERS  # type: ignore[attr-defined]
        tier.give_back(places)

    def loads(tier: DramTier, what: list[Any], places: Any, landed: Any = None) -> None:
        copies, submit = tier.copies, tier.copies.load

        def later(*arguments: Any, **options: Any) -> None:
            if wanted.read_text():
                unlocked.add(id(what[-1]))
                tier._tree.unlock(what[-1], tier._dram)
            give_away(tier)
            submit(*arguments, **options)

        if wanted.exists():
            copies.load = later  # type: ignore[method-assign]
        try:
            load(tier, what, places, landed)
        finally:
            vars(copies).pop("load", None)

    def ended(tier: DramTier, last: Any, *arguments: Any) -> None:
        if id(last) in unlocked:
            unlocked.remove(id(last))
            tier._tree.unlock(last, tier._hbm)
        else:
            loaded(tier, last, *arguments)

    DramTier.load = loads  # type: ignore[method-assign]
    DramTier._loaded = ended  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(want_dram)
