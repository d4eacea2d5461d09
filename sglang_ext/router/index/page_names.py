"""The part of a prompt on an instance's disk, of a model with windows or states, by names of pages."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.keys import BLOCK_KEY_BYTES, page_hashes, page_seed, part_name
from sglang_ext.protocol.agent import Pages
from sglang_ext.radix_global.sync.events import Tenant

Held = Callable[[bytes], bool]
"""Whether a name is among those on disk."""


class PageNames:
    """Names of a prompt's pages, computed as far as they are needed.

    Args:
        key: the encoded prompt.
    """

    def __init__(self, tenant: Tenant, key: bytes, pages: Pages) -> None:
        self._pages = pages
        self._hashes = page_hashes(page_seed(*tenant), key, pages.tokens, pairs=pages.pairs)
        self._names: list[bytes] = []

    def _at(self, page: int) -> bytes | None:
        """The name of a page; None where the prompt has no such whole page, or a picture before its end."""
        while len(self._names) <= page:
            following = next(self._hashes, None)
            if following is None:
                return None
            self._names.append(following[:BLOCK_KEY_BYTES])
        return self._names[page]

    def resumable(self, block_size: int, start: int, held: Held) -> int:
        """The most blocks after which the prompt can be resumed, with the pages on disk behind a place.

        Args:
            block_size: tokens of a block, whole pages.
            start: the place, in blocks: 0, or one where memory lets the prompt resume.
        """
        step = block_size // self._pages.tokens
        first = end = start * step
        while (name := self._at(end)) is not None and held(name):
            end += 1
        for blocks in range(end // step, start, -1):
            if self._covered(first, blocks * step, held):
                return blocks
        return start

    def _covered(self, first: int, end: int, held: Held) -> bool:
        """Whether each component has all pages that a resume before page ``end`` needs behind ``first``."""
        return all(
            held(part_name(name, number))
            for number, needed in enumerate(self._pages.parts, 1)
            for name in self._names[max(first, end - needed) : end]
        )

    def ends(self, block_size: int, start: int, end: int) -> list[bytes]:
        """The names of the last pages of blocks that `resumable` has found."""
        step = block_size // self._pages.tokens
        return self._names[(start + 1) * step - 1 : end * step : step]
