"""Real SGLang pools and allocators on the CPU, and an oracle for the content of every row.

The oracle stands for a model: the KV row of a token in one plane is a function of the namespace, of all
tokens up to it, of the layer and of the plane, and of nothing else. Rows are compared bit by bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from sglang_ext.engine.movers.mover import LayerGate
from sglang_ext.geometry import Geometry
from sglang_ext.keys import decode_tokens
from sglang_ext.patches.adapter.hbm import pool_geometry, pool_planes

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[Any]
"""Rows of words: of 8 bytes, or of 4 where the bytes of a row are no multiple of 8."""

MODEL = SimpleNamespace(vocab_size=1000, is_encoder_decoder=False, hf_text_config=SimpleNamespace())
"""The fields of a model's configuration that SGLang's batches read."""

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class WrongKvError(AssertionError):
    """A slot or block differs from the oracle."""


def publish_server_args() -> None:
    """The configuration that SGLang's functions read from the process: the defaults of a CPU server."""
    args = ServerArgs(
        model_path="dummy", device="cpu", attention_backend="torch_native", sampling_backend="pytorch"
    )
    get_context().set_server_args(args)


def extend_chain(chain: list[int], namespace: Hashable, tokens: Sequence[int]) -> None:
    """Append to ``chain`` the hash of the prefix up to each of ``tokens``, the same in every process."""
    last = chain[-1] if chain else (zlib.crc32(repr(namespace).encode()) * _MIX + 1) & _MASK
    for token in tokens:
        last ^= last >> 31
        last = (last * 0xBF58476D1CE4E5B9 + int(token) * _MIX + 0x94D049BB133111EB) & _MASK
        chain.append(last)


def with_next(chain: Hashes, tokens: Sequence[int], block: int) -> Hashes:
    """The hashes of a draft's rows that also depend on the next token, where prefixes are kept in blocks: the
    row of a block's last token may have been made with the next token of another text. Here it belongs to its
    own token alone.

    Args:
        chain: hashes of the prefix up to each token.
        tokens: the token after each of them.
    """
    after = chain ^ (chain >> np.uint64(31))
    after *= np.uint64(0xBF58476D1CE4E5B9)
    after += np.array(tokens, np.uint64) * np.uint64(_MIX) + np.uint64(0x94D049BB133111EB)
    after[block - 1 :: block] = chain[block - 1 :: block]
    return after


def chain_of(namespace: Hashable, tokens: Sequence[int]) -> list[int]:
    """The hash of the prefix up to each token."""
    chain: list[int] = []
    extend_chain(chain, namespace, tokens)
    return chain


@dataclass(frozen=True)
class PoolKind:
    """How a pool is built: ``mha``, ``mla`` or ``dsa``, tokens per page, the layers of the rank, and those of
    a draft model, which has one KV head, or latents and index keys as a ``dsa`` model has them (NEXTN)."""

    attention: str = "mha"
    page: int = 1
    layers: int = 2
    start_layer: int = 0
    draft_layers: int = 0
    value_dim: int = 6
    """Of a head of V, with ``mha``; K has 4."""
    algorithm: str = "STANDALONE"
    """Of the draft model."""

    @property
    def pairs(self) -> bool:
        """Whether a draft's row also depends on the next token (EAGLE, EAGLE3 and MTP)."""
        return bool(self.draft_layers) and self.algorithm in {"EAGLE", "EAGLE3"}

    def __str__(self) -> str:
        draft = f"-draft{self.draft_layers}" if self.draft_layers else ""
        return f"{self.attention}-page{self.page}{draft}"

    def build_drafts(self, tokens: int) -> list[Any]:
        """The pool of the draft model; none without."""
        if not self.draft_layers:
            return []
        if self.attention == "dsa":
            return [PoolKind("dsa", self.page, self.draft_layers).build(tokens)]
        return [
            MHATokenToKVPool(
                size=tokens,
                page_size=self.page,
                dtype=torch.float32,
                head_num=1,
                head_dim=2,
                layer_num=self.draft_layers,
                device="cpu",
                enable_memory_saver=False,
            )
        ]

    def build(self, tokens: int, device: str = "cpu") -> Any:
        """A real pool of SGLang with ``tokens`` slots (besides the padded ones)."""
        end = self.start_layer + self.layers - 1
        if self.attention == "dsa":
            return DSATokenToKVPool(
                size=tokens,
                page_size=self.page,
                dtype=torch.bfloat16,
                kv_lora_rank=8,
                qk_rope_head_dim=4,
                kv_cache_dim=12,
                layer_num=self.layers,
                device=device,
                index_head_dim=128,
                enable_memory_saver=False,
                start_layer=self.start_layer,
                end_layer=end,
                # The last of several layers uses the choice of the one before.
                skip_topk_layers=[False] * (self.layers - 1) + [self.layers > 1],
            )
        if self.attention == "mla":
            return MLATokenToKVPool(
                size=tokens,
                page_size=self.page,
                dtype=torch.bfloat16,
                kv_lora_rank=8,
                qk_rope_head_dim=4,
                layer_num=self.layers,
                device=device,
                enable_memory_saver=False,
                start_layer=self.start_layer,
                end_layer=end,
            )
        return MHATokenToKVPool(
            size=tokens,
            page_size=self.page,
            dtype=torch.float32,
            head_num=2,
            head_dim=4,
            v_head_dim=self.value_dim,
            layer_num=self.layers,
            device=device,
            enable_memory_saver=False,
            start_layer=self.start_layer,
            end_layer=end,
        )


class Pools:
    """The pools of one rank, as SGLang's scheduler makes them, and the oracle's view of them."""

    device = torch.device("cpu")

    def __init__(self, kind: PoolKind, tokens: int, *, block: int, rows: int, context: int) -> None:
        self.kind = kind
        self.tokens = tokens
        self.block = block
        device = str(self.device)
        self.kvcache = kind.build(tokens, device)
        self.drafts = kind.build_drafts(tokens)
        need_sort = False
        if kind.page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(
                tokens, torch.float32, device, self.kvcache, need_sort
            )
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                tokens, kind.page, torch.float32, device, self.kvcache, need_sort
            )
            # Its checks make the host wait for a device, which hides races.
            self.allocator.debug_mode = device == "cpu"
        self.requests = ReqToTokenPool(rows, context, device, enable_memory_saver=False)
        self.tensors = [layer for pool in (self.kvcache, *self.drafts) for layer in pool_planes(pool)]
        self.oracle = Oracle(self.tensors)

    def geometry(self) -> Geometry:
        """The rank's geometry, as the cache's factory makes it."""
        return pool_geometry(
            self.tensors,
            block_tokens=self.block,
            page_tokens=self.kind.page,
            first_layer=self.kind.start_layer,
            model_layers=self.kind.start_layer + len(self.tensors),
            tp_rank=0,
            tp_size=1,
            model_kv_heads=2 if self.kind.attention == "mha" else 1,
        )

    def row_hashes(self, chain: Hashes, layer: int) -> Hashes:
        """The hashes of one layer's rows, of whole blocks of tokens whose prefixes hash to ``chain``."""
        if layer < self.kind.layers or not self.kind.pairs:
            return chain
        shifted = chain.reshape(-1, self.block).copy()
        shifted[:, :-1] = shifted[:, 1:]
        shifted[:, -1] = chain[self.block - 1 :: self.block]
        return shifted.ravel()

    def register(self, gate: LayerGate) -> None:
        """Have reads wait for loads, as the cache's factory does."""
        self.kvcache.register_layer_transfer_counter(gate)
        for pool in self.drafts:
            pool.register_layer_transfer_counter(gate.behind(self.kind.layers))

    def read(self, layer: int) -> None:
        """Get a layer's buffers for reading, as attention does."""
        pool, layer = self.kvcache, self.kind.start_layer + layer
        if layer >= self.kind.start_layer + self.kind.layers:
            pool, layer = self.drafts[0], layer - self.kind.start_layer - self.kind.layers
        pool.get_kv_buffer(layer)
        if self.kind.attention == "dsa":
            pool.get_index_k_with_scale_buffer(layer)

    def params(self) -> CacheInitParams:
        """The parameters that SGLang passes to a cache."""
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.kind.page,
        )

    def free_slots(self) -> npt.NDArray[np.int64]:
        """Every slot that the allocator would hand out."""
        pages = self.allocator.get_all_free_pages().numpy()
        return (pages[:, None] * self.kind.page + np.arange(self.kind.page)).ravel()

    def all_slots(self) -> npt.NDArray[np.int64]:
        """Every slot there is, the padded ones at the front left out."""
        return np.arange(self.kind.page, self.tokens + self.kind.page)


class Oracle:
    """Writes and compares rows of a pool's planes.

    Args:
        tensors: the pool's planes by layer.
        names: the model layer of each, None for 0, 1, ...; rows of two layers differ in every word.
    """

    def __init__(self, tensors: Planes, names: Sequence[int] | None = None) -> None:
        self.layers = len(tensors)
        self._planes: list[list[_Plane]] = []
        self._salts: list[list[Rows]] = []
        for layer, planes in enumerate(tensors):
            views = [_view(plane) for plane in planes]
            self._planes.append(views)
            name = layer if names is None else names[layer]
            self._salts.append([_salts(name, i, view.words) for i, view in enumerate(views)])

    def expected(self, chain: Hashes, layer: int, plane: int) -> Rows:
        """The rows of the tokens whose prefixes hash to ``chain``, shape (tokens, words of a row)."""
        rows = chain[:, None] ^ self._salts[layer][plane][None, :]
        rows *= np.uint64(_MIX)
        rows ^= rows >> np.uint64(29)
        return rows.astype(self._planes[layer][plane].dtype)

    def rows(self, slots: npt.NDArray[np.int64], layer: int) -> list[Rows]:
        """One layer's rows of ``slots`` as they are, of each plane."""
        return [view.get(slots) for view in self._planes[layer]]

    def write(self, slots: npt.NDArray[np.int64], chain: Hashes, layer: int) -> None:
        """Compute one layer's KV of some tokens, as a forward pass does."""
        for plane, view in enumerate(self._planes[layer]):
            view.put(slots, self.expected(chain, layer, plane))

    def compare(self, slots: npt.NDArray[np.int64], chain: Hashes, layer: int, what: object) -> None:
        """Check that ``slots`` hold one layer's KV of the tokens of ``chain``.

        Raises:
            WrongKvError: names the first token that differs.
        """
        for plane, view in enumerate(self._planes[layer]):
            self._compare_rows(view.get(slots), chain, layer, plane, what)

    def compare_blocks(
        self, blocks: npt.NDArray[np.uint8], chain: Hashes, layer: int, plane: int, what: object
    ) -> None:
        """Check one plane of blocks that lie anywhere, shape (blocks, tokens, row bytes)."""
        view = self._planes[layer][plane].over(np.ascontiguousarray(blocks), len(chain))
        self._compare_rows(view.get(np.arange(len(chain))), chain, layer, plane, what)

    def _compare_rows(self, rows: Rows, chain: Hashes, layer: int, plane: int, what: object) -> None:
        wrong = (rows != self.expected(chain, layer, plane)).any(axis=1)
        if wrong.any():
            first = int(wrong.argmax())
            raise WrongKvError(
                f"{what}: layer {layer}, plane {plane}: token {first} of {len(chain)} is wrong "
                f"({int(wrong.sum())} are)"
            )

    def spoil(self, slots: npt.NDArray[np.int64]) -> None:
        """Overwrite slots that must not be read."""
        for planes in self._planes:
            for view in planes:
                view.put(slots, np.full((len(slots), view.words), 0xDEADDEADDEADDEAD, np.uint64))


class _Plane:
    """One plane as rows of words.

    memory: shape (slots, ...), or bytes of shape (rows, row bytes).
    """

    dtype: Any = np.uint64

    def __init__(self, memory: torch.Tensor | npt.NDArray[np.uint8]) -> None:
        if isinstance(memory, torch.Tensor):
            memory = memory.view(torch.uint8).reshape(memory.shape[0], -1).numpy()
        self._rows: Rows = memory.view(self.dtype)
        assert np.shares_memory(self._rows, memory)
        self.words = self._rows.shape[1]

    def over(self, blocks: npt.NDArray[np.uint8], tokens: int) -> _Plane:
        """The same view of other memory, which has the rows of so many tokens."""
        return type(self)(blocks.reshape(tokens, -1))

    def get(self, slots: npt.NDArray[np.int64]) -> Rows:
        return self._rows[slots]

    def put(self, slots: npt.NDArray[np.int64], rows: Rows) -> None:
        self._rows[slots] = rows.astype(self.dtype)


class _IndexPlane(_Plane):
    """Index keys as SGLang's kernels have them: in each page of 64 tokens all keys of 128 bytes, and then all
    scales of 4 bytes. A row is the key and the scale of a token."""

    dtype = np.uint32
    PAGE, KEY = 64, 32
    """Tokens of a page, and words of a key."""

    def get(self, slots: npt.NDArray[np.int64]) -> Rows:
        keys, scales = self._parts()
        page, place = slots // self.PAGE, slots % self.PAGE
        return np.concatenate([keys[page, place], scales[page, place]], axis=1)

    def put(self, slots: npt.NDArray[np.int64], rows: Rows) -> None:
        keys, scales = self._parts()
        page, place = slots // self.PAGE, slots % self.PAGE
        keys[page, place], scales[page, place] = rows[:, : self.KEY], rows[:, self.KEY :]

    def _parts(self) -> tuple[Rows, Rows]:
        pages = self._rows.reshape(-1, self.PAGE * self.words, copy=False)
        keys, scales = pages[:, : self.PAGE * self.KEY], pages[:, self.PAGE * self.KEY :]
        return keys.reshape(-1, self.PAGE, self.KEY, copy=False), scales.reshape(-1, self.PAGE, 1, copy=False)


class PagePlane(_Plane):
    """Rows of whole pages, from each of which every token has the same share as its row.

    Args:
        memory: bytes of shape (pages, row bytes).
        page: tokens of a page.
        most: bytes of the share that are written and compared; copies move whole rows.
    """

    dtype = np.uint8

    def __init__(self, memory: torch.Tensor | npt.NDArray[np.uint8], page: int, most: int) -> None:
        super().__init__(memory)
        self._page, self._most = page, most
        share = self.words // page
        self._shares = self._rows[:, : page * share].reshape(-1, page, share, copy=False)[..., :most]
        self.words = self._shares.shape[-1]

    def over(self, blocks: npt.NDArray[np.uint8], tokens: int) -> PagePlane:
        return PagePlane(blocks.reshape(tokens // self._page, -1), self._page, self._most)

    def get(self, slots: npt.NDArray[np.int64]) -> Rows:
        return self._shares[slots // self._page, slots % self._page]

    def put(self, slots: npt.NDArray[np.int64], rows: Rows) -> None:
        self._shares[slots // self._page, slots % self._page] = rows.astype(self.dtype)


Planes = Sequence[Sequence[torch.Tensor | PagePlane]]
"""The planes of each layer."""


def _view(plane: torch.Tensor | PagePlane) -> _Plane:
    if isinstance(plane, PagePlane):
        return plane
    return _IndexPlane(plane) if plane.dim() == 2 else _Plane(plane)


def node_chains(root: Any, namespace: Hashable) -> list[tuple[Any, list[int]]]:
    """Every node below ``root`` with the hashes of its own tokens."""
    found: list[tuple[Any, list[int]]] = []
    stack: list[tuple[Any, list[int]]] = [(child, []) for child in root.children.values()]
    while stack:
        node, last = stack.pop()
        chain = list(last)
        extend_chain(chain, namespace, decode_tokens(node.key).tolist())
        own = chain[len(last) :]
        found.append((node, own))
        stack.extend((child, own[-1:]) for child in node.children.values())
    return found


def _salts(layer: int, plane: int, words: int) -> Rows:
    start = 1 + (layer * 8 + plane) * 64
    return np.arange(start, start + words, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
