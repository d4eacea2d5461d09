"""Where a request's KV lands at decode: slots of the engine's pool, and a metadata row."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from sglang_ext.disagg.errors import PeerProtocolError
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.staging import STAGING, Staging
from sglang_ext.engine.forward_fence import Passed, nothing_runs
from sglang_ext.engine.pd.messages import Ready
from sglang_ext.engine.pd.prompt_logprobs import PromptLogprobs, require_sound
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.wire import pack_ids, unpack_ids


class MetadataRows(Protocol):
    """SGLang's metadata buffers."""

    def write(self, row: int, metadata: bytes) -> None:
        """Fill a row; raises ValueError when the size is wrong."""


@dataclass(frozen=True)
class PoolRows:
    """Blocks of a pool of an endpoint that a hand-over moves beside the pages of all tokens: the window of a
    request, in pages of the window's pool, or its state."""

    pool: str
    rows: Ids


@dataclass(frozen=True)
class Wanted:
    """The slots and the row that the engine has set aside. pages: ours, for the prompt after `skip` pages.
    passed: whether the forward passes have ended that may still store a former request's KV there. beside:
    blocks of further pools, all of which prefill hands over.
    """

    pages: Ids
    skip: int
    row: int
    passed: Passed = nothing_runs
    beside: tuple[PoolRows, ...] = ()


class Landing:
    """The memory of one decode rank, as hand-overs fill it.

    Args:
        staging: where aggregated requests arrive.
        block_bytes: of this rank's part of a block, by pool.
    """

    def __init__(self, rows: MetadataRows, staging: Staging | None, block_bytes: Mapping[str, int]) -> None:
        self._rows = rows
        self._staging = staging
        self._block_bytes = block_bytes

    def nbytes(self, wanted: Wanted) -> int:
        """Bytes of all that is wanted in this rank."""
        moved = (PoolRows(HBM_POOL, wanted.pages), *wanted.beside)
        return sum(each.rows.size * self._block_bytes[each.pool] for each in moved)

    @contextlib.asynccontextmanager
    async def filling(self, wanted: Wanted) -> AsyncIterator[tuple[str, Ids]]:
        """The pool to fill while the block runs, and its blocks: the wanted pages themselves, or blocks of
        staging, if there are enough. These are unpacked into the pages after the block, unless it raises.
        """
        staging = self._staging
        blocks = staging.take(wanted.pages.size) if staging is not None else None
        if staging is None or blocks is None:
            yield HBM_POOL, wanted.pages
            return
        try:
            yield STAGING, blocks
            await staging.unpack(blocks, wanted.pages)
        finally:
            staging.give(blocks)

    def keep(self, wanted: Wanted, ready: Ready) -> PromptLogprobs | None:
        """Keep the results that prefill's first rank has computed beside the KV; returns those of the
        prompt."""
        if ready.logprobs is not None:
            require_sound(ready.logprobs)
        self._rows.write(wanted.row, ready.metadata)
        return ready.logprobs


def after_skip(offer: Offer, skip: int, places: int) -> Offer:
    """The offer without the first `skip` blocks, which decode has already.

    Args:
        places: how many blocks are set aside for the others.

    Raises:
        PeerProtocolError: there are more or fewer others; the two sides saw other prompts.
    """
    blocks, generations = unpack_ids(offer.blocks), unpack_ids(offer.generations)
    if blocks.size - skip != places or generations.size != blocks.size:
        raise PeerProtocolError(
            f"prefill has {blocks.size} pages in {offer.pool}, decode {skip} and room for {places}"
        )
    return msgspec.structs.replace(
        offer, blocks=pack_ids(blocks[skip:]), generations=pack_ids(generations[skip:])
    )


def pages_of(indices: object) -> Ids:
    """SGLang's page or slot indices as block ids."""
    return np.asarray(indices, np.int64).reshape(-1)
