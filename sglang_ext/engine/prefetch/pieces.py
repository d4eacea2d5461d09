"""The pieces in which a prompt's blocks are copied from DRAM to HBM, one piece at a time.

A piece is copied behind all copies that a request waits for, to slots that are free, or whose blocks have a
copy elsewhere and were not used since the prefetch began, or were announced with a lower priority. Its slots
belong to no request until it has arrived; then its blocks enter the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_ext.engine.moves.move import Move, MovePlanner
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import OwnCopy
from sglang_ext.engine.prefetch.prompt_queue import Prompt
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.retention import path_of
from sglang_ext.mempool.ledger import Committed, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.radix_global import Node
from sglang_ext.tiers import Tier

PIECE_BLOCKS = 64
"""Copied at a time; HBM cannot release these blocks for as long as the copy takes."""


@dataclass(eq=False, kw_only=True)
class _Piece(Move):
    """The blocks of a prompt that are being copied to HBM."""

    prompt: Prompt


class Pieces(MovePlanner):
    """See the module's docstring.

    Args:
        on_surrender: called with the prompt of a piece whose slots SGLang has taken back.
    """

    def __init__(
        self,
        store: Store,
        tier: DramTier,
        hbm_tier: HbmTier,
        moves: Moves,
        on_surrender: Callable[[Prompt], None],
    ) -> None:
        self._store = store
        self._tree = store.tree
        self._tier = tier
        self._hbm_tier = hbm_tier
        self._moves = moves
        self._on_surrender = on_surrender
        self._piece: _Piece | None = None
        self.most_blocks = PIECE_BLOCKS

    def __bool__(self) -> bool:
        """Whether a piece is under way."""
        return self._piece is not None

    def arriving_tokens(self) -> int:
        """Tokens of the piece under way."""
        return 0 if self._piece is None else self._piece.blocks * self._tree.block_size

    def reached(self, prompt: Prompt) -> tuple[int, list[Node]]:
        """How many blocks of a prompt HBM has, and the nodes after them that DRAM has."""
        path = path_of(self._tree, prompt.namespace, prompt.key)
        in_hbm, below = self._tier.split(node for _, node in path)
        return sum(node.blocks for node in in_hbm), below

    def start(self, prompt: Prompt, below: list[Node]) -> bool:
        """Start to copy the first of these nodes, which follow the blocks that the prompt has ``reached``.
        False without room.
        """
        wanted = min(self.most_blocks, sum(node.blocks for node in below))
        self._hbm_tier.make_room(wanted, unused_since=prompt.since, priority=prompt.priority)
        nodes = self._first(below, min(wanted, self._hbm_tier.free_blocks))
        blocks = sum(node.blocks for node in nodes)
        reservation = self._store.reserve_spare(
            Tier.HBM, prompt.namespace, prompt.key, Use.PREFETCH, prompt.reached, blocks
        )
        if isinstance(reservation, Refusal):
            return False
        reservation.on_surrender = self._surrendered
        copy = OwnCopy(reservation, self._tier.copies.settle)
        self._piece = _Piece(planner=self, prompt=prompt, onward=False)
        self._moves.fill(self._piece, reservation, copy)
        self._store.swap_in(Tier.DRAM, nodes, reservation.places, copy.arrived)
        return True

    def _first(self, nodes: list[Node], blocks: int) -> list[Node]:
        """The first ``blocks`` blocks of a path, splitting the node in which they end."""
        found: list[Node] = []
        for node in nodes:
            if blocks <= 0:
                break
            found.append(node if node.blocks <= blocks else self._tree.split(node, blocks))
            blocks -= found[-1].blocks
        return found

    def ended(self, move: _Piece, blocks: int, done: Committed | None) -> None:
        """The bytes of a piece are in its slots. Its blocks are in the tree now, except where a request had
        inserted them already, or where the blocks in front of them were given up meanwhile.
        """
        self._piece = None
        if done is not None:
            move.prompt.brought += done.fresh

    def _surrendered(self) -> None:
        """SGLang has taken back the slots of the piece under way, of which no copy was under way any more."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._moves.surrendered(piece)
            self._on_surrender(piece.prompt)

    def cancel(self) -> None:
        """Give the piece under way up."""
        if self._piece is not None:
            self._moves.cancel(self._piece)
