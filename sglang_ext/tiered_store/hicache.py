"""Files that SGLang's HiCache wrote, as a tier: blocks are read from them and never written.

HiCache's file backend keeps a file for each page of tokens: a hash chained over the tokens of the prefix, a
suffix that names model and rank, and ``.bin``. It holds the rows of all planes, in an order that is not
written in it (`PageOrder`), without a checksum. Tokens cannot be had from their hash, so the files cannot be
listed as blocks. Instead, `follow` computes the hashes of each prompt that is looked up, and remembers which
of its blocks the directory has.

The directory is listed once, when the tier is opened. A file that is gone later is a miss. One of a wrong
size is damaged, and so is one in which a whole layer is zero, as a crash leaves it of a file that was not
synced. Other damage cannot be seen: such a file is believed. Files that another user could change are not
read.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_ext.errors import ConfigError
from sglang_ext.folders import Identity, own_folder, problem_of
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import TOKEN_BYTES, decode_tokens, page_hashes, page_seed
from sglang_ext.tiered_store.tier import (
    BlockMemory,
    BlockTier,
    Get,
    Ids,
    LayerRead,
    Outcome,
    Put,
    TierStats,
    check_get_layer,
)
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)

ENDING: Final = ".bin"
FIELD: Final = "--kv-load-policy hicache"
_HASH_BYTES = hashlib.sha256().digest_size
_HASH_CHARACTERS = 2 * _HASH_BYTES

Pages = tuple[bytes, ...]
"""The hashes of a block's pages, in order."""


class PageOrder(enum.StrEnum):
    """How the rows of a page lie in its file; the words are those of ``--hicache-mem-layout``."""

    LAYER_FIRST = "layer_first"
    """K of all layers, then V: for each layer the rows of all tokens."""
    PAGE_FIRST = "page_first"
    """K of all tokens, then V: for each token the rows of all layers."""
    PAGE_FIRST_DIRECT = "page_first_direct"
    """The order of `LAYER_FIRST`."""
    PAGE_UNIFIED = "page_unified"
    """For each layer K of all tokens, then V. Files have the names of the unified key scheme."""


@dataclass(frozen=True)
class PageFormat:
    """A page's file.

    layout: of a block. All planes of all layers have rows of one size.
    page_tokens: tokens of a page, a divisor of the block's.
    """

    order: PageOrder
    layout: BlockLayout
    page_tokens: int

    @property
    def page_bytes(self) -> int:
        return self.layout.token_bytes * self.page_tokens

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.layout.block_tokens // self.page_tokens

    def runs(self, layer: int) -> list[tuple[int, int, int]]:
        """The bytes of one layer of a page: offset in the file, offset in that layer of a block whose first
        page it is, and length.
        """
        planes, layers, tokens = len(self.layout.layers[0]), self.layout.n_layers, self.page_tokens
        row = self.layout.row_bytes[0]
        found: list[tuple[int, int, int]] = []
        for plane in range(planes):
            place = plane * self.layout.block_tokens * row
            if self.order is PageOrder.PAGE_FIRST:
                for token in range(tokens):
                    before = (plane * tokens + token) * layers + layer
                    found.append((before * row, place + token * row, row))
            else:
                unified = self.order is PageOrder.PAGE_UNIFIED
                before = layer * planes + plane if unified else plane * layers + layer
                found.append((before * tokens * row, place, tokens * row))
        return found


@dataclass(slots=True, eq=False)
class HiCacheGet(Get):
    """pages: the files of each block."""

    pages: list[Pages]
    open: bool = True


class HiCacheStore(BlockTier):
    """See the module's docstring.

    Args:
        folder: HiCache's directory.
        suffix: the part of this rank's file names between the hash and the ending.
        order: of the rows in a file.
        layout: of a block of this rank.
        tier: under which the blocks are counted.

    Raises:
        ConfigError: the directory cannot be read or could be changed by another user, has no file of this
            rank, or its pages do not fit.
    """

    durable = False

    def __init__(self, folder: Path, suffix: str, order: PageOrder, layout: BlockLayout, tier: Tier) -> None:
        self.tier = tier
        self.layout = layout
        self._folder = folder
        self._suffix = suffix
        self._pages, page_bytes = _listed(folder, suffix)
        self.format = _fitting(page_bytes, order, layout, folder)
        self._runs = [self.format.runs(layer) for layer in range(layout.n_layers)]
        self._named: dict[bytes, dict[bytes, Pages]] = {}
        """By namespace: the name of a block -> its pages, all of which were there when it was looked up."""
        self._identity = Identity.ours()
        self._lock = threading.Lock()
        self._pins = 0
        self._closed = False
        self._put: Counter[Outcome] = Counter()
        self._got: Counter[Outcome] = Counter()

    def __repr__(self) -> str:
        return f"<HiCacheStore {self._folder} {self._suffix} pages={len(self._pages)}>"

    # --- looking ---

    def follow(
        self,
        namespace: bytes,
        tenant: tuple[str | None, str | None],
        parent: bytes,
        names: Sequence[bytes],
        key: bytes,
    ) -> None:
        """Remember which blocks of a prompt have files, as far as the first that has none.

        Args:
            namespace: in which the blocks have these names.
            tenant: extra key and cache salt.
            parent: name of the block before them; empty at the start of a prompt.
            names: of the blocks.
            key: their encoded tokens.
        """
        with self._lock:
            known = self._named.get(namespace, {})
            before = known.get(parent)
            if parent and before is None:
                return
            prior = before[-1] if before else page_seed(*tenant)
            step = self.layout.block_tokens * TOKEN_BYTES
            for index, name in enumerate(names):
                pages = known.get(name) or self._hashes(prior, key[index * step : (index + 1) * step])
                if pages is None:
                    return
                self._named.setdefault(namespace, known)[name] = pages
                prior = pages[-1]

    def _hashes(self, prior: bytes, block: bytes) -> Pages | None:
        """The pages of a block after a page; None where one is not there or has tokens that are not text."""
        if (decode_tokens(block) < 0).any():
            return None
        pages: list[bytes] = []
        for page in page_hashes(prior, block, self.format.page_tokens):
            if page not in self._pages:
                return None
            pages.append(page)
        return tuple(pages)

    def _found(self, namespace: bytes, keys: Sequence[bytes]) -> list[Pages]:
        """The pages of the leading blocks that are here."""
        named = self._named.get(namespace, {})
        found: list[Pages] = []
        for key in keys:
            pages = named.get(key)
            if pages is None or not self._pages.issuperset(pages):
                break
            found.append(pages)
        return found

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        with self._lock:
            return len(self._found(namespace, keys))

    # --- writing: refused ---

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
        outcome = Outcome.CLOSED if self._closed else Outcome.READ_ONLY
        with self._lock:
            self._put[outcome] += len(keys)
        return outcome

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        raise ValueError("HiCache's files are not written")

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        if puts:
            raise ValueError("HiCache's files are not written")
        return []

    def abort_put(self, put: Put) -> None:
        raise ValueError("HiCache's files are not written")

    # --- reading ---

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> HiCacheGet:
        with self._lock:
            found = self._found(namespace, keys)
            self._got[Outcome.ABSENT] += len(keys) - len(found)
            self._pins += len(found)
        return HiCacheGet(namespace, tuple(keys), len(found), found)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        check_get_layer(get, layer, memory, ids, self.layout)
        get = _own(get)
        for place, row in enumerate(memory.rows(layer, ids)):
            if place >= get.blocks:
                return LayerRead(get.blocks, Outcome.ABSENT)
            view = row.data
            for number, page in enumerate(get.pages[place]):
                outcome = self._read(page, number, layer, view)
                if outcome is not Outcome.DONE:
                    self._failed(get, place, page, outcome)
                    return LayerRead(get.blocks, outcome)
        return LayerRead(len(ids), Outcome.DONE)

    def _read(self, page: bytes, number: int, layer: int, block: memoryview) -> Outcome:
        """Read one layer of the page with this number in its block."""
        shift = number * self.format.page_tokens * self.layout.row_bytes[0]
        zero = True
        try:
            file = os.open(self._path(page), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(file)
                if problem := problem_of(status, self._identity, is_parent=False, in_sticky=False):
                    raise PermissionError(errno.EPERM, f"it {problem}", str(self._path(page)))
                if status.st_size != self.format.page_bytes:
                    return Outcome.DAMAGED
                for offset, place, length in self._runs[layer]:
                    into = block[place + shift : place + shift + length]
                    if os.preadv(file, [into], offset) != length:
                        return Outcome.DAMAGED
                    zero = zero and into == bytes(length)
            finally:
                os.close(file)
        except FileNotFoundError:
            return Outcome.ABSENT
        except OSError as error:
            logger.warning("A page of HiCache cannot be read: %s", error)
            return Outcome.IO_ERROR
        return Outcome.DAMAGED if zero else Outcome.DONE

    def _path(self, page: bytes) -> Path:
        return self._folder / f"{page.hex()}{self._suffix}{ENDING}"

    def _failed(self, get: HiCacheGet, place: int, page: bytes, outcome: Outcome) -> None:
        with self._lock:
            self._pins -= max(0, get.blocks - place)
            get.blocks = min(get.blocks, place)
            self._got[outcome] += 1
            if outcome is not Outcome.IO_ERROR:
                self._pages.discard(page)
        if outcome is Outcome.DAMAGED:
            logger.warning("A page of HiCache is damaged, and computed instead: %s", self._path(page))

    def complete_get(self, get: Get) -> None:
        get = _own(get)
        get.open = False
        with self._lock:
            self._pins -= get.blocks
            self._got[Outcome.DONE] += get.blocks

    # --- whole ---

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Forget blocks until the next start. The files stay, here and in `clear`."""
        with self._lock:
            named = self._named.get(namespace, {})
            gone = [pages for key in keys if (pages := named.pop(key, None)) is not None]
            self._pages.difference_update(*gone)
            return len(gone)

    def clear(self, namespace: bytes | None = None) -> int:
        if namespace is not None:
            return self.drop(namespace, list(self._named.get(namespace, {})))
        with self._lock:
            blocks = len(self._pages) // self.format.pages
            self._pages.clear()
            self._named.clear()
            return blocks

    def stats(self) -> TierStats:
        with self._lock:
            pages = len(self._pages)
            return TierStats(
                blocks=pages // self.format.pages,
                used_bytes=pages * self.format.page_bytes,
                limit_bytes=pages * self.format.page_bytes,
                pins=self._pins,
                put=dict(self._put),
                got=dict(self._got),
            )

    def check(self) -> None:
        with self._lock:
            assert self._pins >= 0, f"{self._pins} pins"
            for named in self._named.values():
                for pages in named.values():
                    assert len(pages) == self.format.pages, f"a block of {len(pages)} pages"

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._pages.clear()
            self._named.clear()


def _listed(folder: Path, suffix: str) -> tuple[set[bytes], int]:
    """The hashes of the pages with a suffix, and the size of the first one's file."""
    ending = suffix + ENDING
    pages: set[bytes] = set()
    size = 0
    try:
        own_folder(folder, FIELD)
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if len(name) != _HASH_CHARACTERS + len(ending) or not name.endswith(ending):
                    continue
                try:
                    pages.add(bytes.fromhex(name[:_HASH_CHARACTERS]))
                except ValueError:
                    continue
                size = size or entry.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"the files of HiCache cannot be listed: {error}",
            field=FIELD,
            hint="Name a directory that this user can read",
        ) from error
    if not pages:
        raise ConfigError(
            f"no file in {folder} is named HASH{ending}",
            field=FIELD,
            hint="Start with the --served-model-name, --tp-size and, for page_unified, --page-size of the "
            "server that wrote them, or leave the setting out",
        )
    return pages, size


def _fitting(page_bytes: int, order: PageOrder, layout: BlockLayout, folder: Path) -> PageFormat:
    """The format of files of this size.

    Raises:
        ConfigError: the size is no number of tokens, or a block is no number of pages.
    """
    tokens, rest = divmod(page_bytes, layout.token_bytes)
    if rest or not tokens:
        raise ConfigError(
            f"files of {page_bytes} bytes in {folder} do not hold whole tokens of {layout.token_bytes} bytes",
            field=FIELD,
            hint="Start with the model and --kv-cache-dtype of the server that wrote them",
        )
    if layout.block_tokens % tokens:
        raise ConfigError(
            f"a block of {layout.block_tokens} tokens is not made of pages of {tokens}, as the files in "
            f"{folder} have them",
            field=FIELD,
            hint=f"Start with --kv-block-size {tokens}",
        )
    return PageFormat(order, layout, tokens)


def _own(get: Get) -> HiCacheGet:
    if not isinstance(get, HiCacheGet) or not get.open:
        raise ValueError("this get is not one of this tier, or has ended")
    return get
