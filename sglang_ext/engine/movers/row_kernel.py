"""The Triton kernel that copies KV on a GPU: between pool, pinned DRAM and staging memory, in one launch.

A kernel reads pinned host memory in place (CUDA maps registered memory into the GPU's address space), so that
a load needs neither a staging buffer nor a call for each run of neighbouring blocks.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

WARPS: Final = 8
WORDS: Final = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}
_NOT_SPECIALIZED: Final = ("sources", "source_units", "targets", "target_units", "pieces", "tokens")
"""A value of 1, or an address that 16 does not divide, would compile another kernel while requests run."""


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)  # type: ignore[untyped-decorator]
def copy_rows(  # type: ignore[no-untyped-def]
    sources,
    source_units,
    targets,
    target_units,
    pieces,
    tokens,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    SOURCE_TOKENS: tl.constexpr,
    TARGET_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Copy pieces of the rows of tokens. Each program takes tiles of ROWS tokens of one piece in turn.

    sources, targets: int64 rows of four for each piece: address, words of its row, words from one unit to the
        next, words from one token to the next within a unit. A unit is a block, or a slot of one token.
    source_units, target_units: int64, the unit of each run of SOURCE_TOKENS or TARGET_TOKENS tokens.
    ALIGNED: by how many words all addresses and numbers of words can be divided: those of 16 bytes, or 1.
    """
    for item in range(tl.program_id(0), (tokens + ROWS - 1) // ROWS * pieces, tl.num_programs(0)):
        here = sources + (item % pieces) * 4
        there = targets + (item % pieces) * 4
        token = (item // pieces) * ROWS + tl.arange(0, ROWS)
        live = token < tokens
        source = tl.multiple_of(tl.load(here).to(tl.pointer_type(WORD)), ALIGNED * WORD_BYTES)
        target = tl.multiple_of(tl.load(there).to(tl.pointer_type(WORD)), ALIGNED * WORD_BYTES)
        width = tl.multiple_of(tl.load(here + 1), ALIGNED)
        unit = tl.load(source_units + token // SOURCE_TOKENS, live, 0)
        at = unit * tl.multiple_of(tl.load(here + 2), ALIGNED)
        at += (token % SOURCE_TOKENS) * tl.multiple_of(tl.load(here + 3), ALIGNED)
        unit = tl.load(target_units + token // TARGET_TOKENS, live, 0)
        to = unit * tl.multiple_of(tl.load(there + 2), ALIGNED)
        to += (token % TARGET_TOKENS) * tl.multiple_of(tl.load(there + 3), ALIGNED)
        word = tl.arange(0, WIDE)
        inside = live[:, None] & (word < width)[None, :]
        rows = tl.load(source + at[:, None] + word[None, :], inside, 0, cache_modifier=".cg")
        tl.store(target + to[:, None] + word[None, :], rows, inside)
