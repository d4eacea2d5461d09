"""Where a request's KV lands at decode: slots of the engine's pool, and a metadata row."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
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
class Wanted:
    """The slots and the row that the engine has set aside. pages: ours, for the prompt after `skip` pages.
    passed: whether the forward passes have ended that may still store a former request's KV there.
    """

    pages: Ids
    skip: int
    row: int
    passed: Passed = nothing_runs


class Landing:
    """The memory of one decode rank, as hand-overs fill it.

    Args:
        staging: where aggregated requests arrive.
        page_bytes: of this rank's part of a page.
    """

    def __init__(self, rows: MetadataRows, staging: Staging | None, page_bytes: int) -> None:
        self._rows = rows
        self._staging = staging
        self._page_bytes = page_bytes

    def nbytes(self, wanted: Wanted) -> int:
        """Bytes of the wanted pages in this rank."""
        return wanted.pages.size * self._page_bytes

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


def after_skip(offer: Offer, wanted: Wanted) -> Offer:
    """The offer without the pages that decode has already.

    Raises:
        PeerProtocolError: the remaining pages do not match the slots set aside; the two sides saw other
            prompts.
    """
    blocks, generations = unpack_ids(offer.blocks), unpack_ids(offer.generations)
    if blocks.size - wanted.skip != wanted.pages.size or generations.size != blocks.size:
        raise PeerProtocolError(
            f"prefill has {blocks.size} pages, decode {wanted.skip} and room for {wanted.pages.size}"
        )
    return msgspec.structs.replace(
        offer, blocks=pack_ids(blocks[wanted.skip :]), generations=pack_ids(generations[wanted.skip :])
    )


def pages_of(indices: object) -> Ids:
    """SGLang's page indices as block ids."""
    return np.asarray(indices, np.int64)
