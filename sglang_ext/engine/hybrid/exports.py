"""Exports the blocks of a prompt that DRAM has to a peer, which finds them by name in each component.

An export holds a lock on its blocks and a lease in each component (``arena_leases``). A lease ends when its
reader reports completion, is dead, or is late; the locks are released once all leases of the export have
ended on every rank. Blocks on their way from HBM are waited for, and blocks on disk only are read first.

All methods run in the scheduler's thread, on every rank between the same two passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from sglang_ext.clock import Clock
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.hybrid.components import FULL, Component
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import HybridStore, StoredComponent
from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.peers.arena_leases import ArenaLeases
from sglang_ext.engine.peers.export import ExportCounters
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.geometry import mla_geometry
from sglang_ext.tiered_store.dram.arena import Arena
from sglang_ext.tiered_store.loading.layers import AHEAD

MOST_EXPORTS: Final = 32
SHARE: Final = 4
"""At most ``1 / SHARE`` of DRAM is exported at a time: of each component as many bytes, and one block in any
case."""

NamesOf = Callable[[Hashable, bytes], Sequence[Name]]
"""The names of a prompt's pages, from its namespace and its encoded whole pages."""


def pool_name(component: Component) -> str:
    """The pool of an endpoint that is a component's DRAM."""
    return f"dram {component}"


def component_pool(component: Component, arena: Arena, namespace: str) -> PoolSpec:
    """A component's DRAM as a pool of an endpoint. Each block is one row of bytes.

    Args:
        namespace: differs wherever the bytes are not interchangeable.
    """
    row = mla_geometry(
        addresses=(0,),
        slots=arena.n_blocks,
        latent_dim=arena.block_bytes,
        dtype="uint8",
        block_tokens=1,
    )
    spec = PoolSpec.of_arena(pool_name(component), row, arena)
    return dataclasses.replace(spec, namespace=namespace)


class Leases(Protocol):
    """The methods of ``arena_leases.ArenaLeases`` that are used here."""

    def publish(self, export: str, ids: BlockIds, seconds: float, names: bytes = b"") -> int | None: ...

    def give_up(self, export: str, seconds: float) -> None: ...

    def withdraw(self, lease: int) -> None: ...

    def over(self, lease: int) -> bool: ...

    def forget(self, lease: int) -> None: ...


def leases_of(store: HybridStore, transfers: TransferThread) -> dict[Component, Leases]:
    """The leases of each component of a store, whose pools the thread's endpoint has."""
    return {component: ArenaLeases(transfers, pool_name(component)) for component in store.parts}


@dataclass(eq=False)
class _Asked:
    """An export that is to be made when copies and reads have ended.

    until: the reader has given up after this time, on this rank's clock. saves: those begun before it.
    """

    export: str
    names: Sequence[Name]
    seconds: float
    until: float
    saves: int


@dataclass(eq=False)
class _Lease:
    """One component of an export. number: None where this rank could not publish."""

    part: StoredComponent
    ids: BlockIds
    number: int | None


class NamedExports:
    """See the module's docstring.

    Args:
        leases: of each component.
        ranks: agree on which exports have ended.
    """

    def __init__(
        self,
        store: HybridStore,
        leases: Mapping[Component, Leases],
        ranks: Ranks,
        clock: Clock,
        names: NamesOf,
    ) -> None:
        self._store = store
        self._leases = leases
        self._clock = clock
        self._names = names
        self._asked: list[_Asked] = []
        self._exports: list[list[_Lease]] = []
        self.counters = ExportCounters()
        ranks.add(self)

    def __repr__(self) -> str:
        return f"NamedExports({len(self._exports)}, {self.counters})"

    def export(
        self, export: str, namespace: Hashable, key: bytes, seconds: float, *, leaving: bool = False
    ) -> None:
        """Export the blocks of a prompt that are here, maybe none. leaving: instances keep no windows or
        states for others.
        """
        if leaving or len(self._exports) + len(self._asked) >= MOST_EXPORTS:
            self.export_nothing(export, seconds)
            return
        names = self._names(namespace, key)
        until = self._clock.monotonic() + seconds
        asked = _Asked(export, names, seconds, until, self._store.saves)
        self._asked.append(asked)
        if self._store.has_disk and names:
            self._store.promote(asked, names, AHEAD)

    def export_nothing(self, export: str, seconds: float, layers: int = 1) -> None:
        """Answer a peer that asks for this export: no blocks will come."""
        for leases in self._leases.values():
            leases.give_up(export, seconds)

    # -- publishing -----------------------------------------------------------------------------------

    def _publish(self, asked: _Asked) -> None:
        full = self._store.parts[FULL]
        lacking = np.flatnonzero(~full.memory.held(asked.names))
        end = min(int(lacking[0]) if len(lacking) else len(asked.names), self._room(full))
        names = asked.names[:end]
        made = []
        # The reader asks for `FULL` first: its lease is the last that is published.
        for part in reversed(self._store.parts.values()):
            held = [name for name in names if name in part.memory]
            held = held[max(0, len(held) - self._room(part)) :]
            ids = part.memory.take(held)
            assert ids is not None
            number = self._leases[part.component].publish(
                asked.export, ids, asked.seconds, names=b"".join(held)
            )
            if number is None:
                self._leases[part.component].give_up(asked.export, asked.seconds)
            made.append(_Lease(part, ids, number))
            self.counters.exported += len(ids)
        self._exports.append(made)
        self._store.release(asked)

    def _room(self, part: StoredComponent) -> int:
        """How many more blocks of a component may be exported."""
        used = sum(len(each.ids) for export in self._exports for each in export if each.part is part)
        most = part.memory.arena.n_blocks // (SHARE * len(self._store.parts))
        return max(0, max(1, most) - used)

    def propose(self) -> Sequence[int]:
        """For each export, whether it has ended here; for each one yet to be made, whether it is too late."""
        now = self._clock.monotonic()
        ended = [int(all(self._over(each) for each in export)) for export in self._exports]
        return ended + [int(now > asked.until) for asked in self._asked]

    def _over(self, lease: _Lease) -> bool:
        return lease.number is None or self._leases[lease.part.component].over(lease.number)

    def act(self, agreed: Sequence[int]) -> None:
        """Release the exports that have ended on every rank, and publish those with their blocks in DRAM."""
        late = agreed[len(self._exports) :]
        for export, over in zip(list(self._exports), agreed, strict=False):
            if over:
                self._end(export)
        for asked, too_late in zip(list(self._asked), late, strict=False):
            if too_late:
                self._give_up(asked)
            elif self._store.saved(asked.saves) and self._store.ready(asked):
                self._asked.remove(asked)
                self._publish(asked)

    def _give_up(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        self._store.release(asked)
        self.export_nothing(asked.export, asked.seconds)

    def _end(self, export: list[_Lease]) -> None:
        self._exports.remove(export)
        for each in export:
            if each.number is not None:
                self._leases[each.part.component].forget(each.number)
            each.part.memory.unlock(each.ids)
            self.counters.given_back += len(each.ids)

    # -- whole ----------------------------------------------------------------------------------------

    def clear(self) -> None:
        """The cache is about to be emptied, or the weights change: end every export. Readers find that the
        blocks they read are stale.
        """
        for asked in list(self._asked):
            self._give_up(asked)
        for export in list(self._exports):
            for each in export:
                if each.number is not None:
                    self._leases[each.part.component].withdraw(each.number)
            self._end(export)

    @property
    def exported_blocks(self) -> int:
        """Blocks of exports that have not ended."""
        return sum(len(each.ids) for export in self._exports for each in export)

    @property
    def busy(self) -> bool:
        return bool(self._exports or self._asked)
