"""How a disk is shared among the components of a model, each of which has a directory of its own: pure."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_ext.engine.hybrid.components import AtSnapshot, Component, LastWindow

TURN_TOKENS = 1024
"""Tokens that a turn of a conversation adds, on average."""
SNAPSHOTS = 2
"""States that a turn leaves: at the end of the prompt, and of the answer."""


def shares(nbytes: int, block_bytes: Mapping[Component, int], block_tokens: int) -> dict[Component, int]:
    """Bytes for each component, so that all of them keep about as many turns.

    A turn adds the KV of its tokens, the window at its end, and its states.

    Args:
        block_bytes: of one block of each component.
        block_tokens: tokens of a block.
    """
    turn = {
        component: size * _blocks_of_a_turn(component, block_tokens)
        for component, size in block_bytes.items()
    }
    whole = sum(turn.values())
    return {component: nbytes * size // whole for component, size in turn.items()}


def _blocks_of_a_turn(component: Component, block_tokens: int) -> int:
    if isinstance(component.coverage, AtSnapshot):
        return SNAPSHOTS
    blocks = -(-TURN_TOKENS // block_tokens)
    if isinstance(component.coverage, LastWindow):
        return min(blocks, component.coverage.blocks(block_tokens) + 1)
    return blocks
