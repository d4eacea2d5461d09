"""The pools of a hybrid model as byte rows: one `ComponentPool` for each component.

Components are those of SGLang's tree: `FULL` for all layers with attention to every token, a window for the
layers with a sliding window, a state for recurrent layers. A block of `FULL` and of the window is a page, a
block of the state is the state of one request at one place.

Draft models have pools of their own with the model's slots. Their layers follow the model's in the component
by whose slots they are indexed, so that a page brings its draft KV with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.tensors import TensorMeta
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.engine.hybrid.components import FULL, AtSnapshot, Component, LastWindow
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import ELEMENT_DIM, HEAD_DIM, TOKEN_DIM, BlockLayout, PlaneKind, Shard
from sglang_ext.patches.adapter.admission import FLAG, QSA_POOL
from sglang_ext.patches.adapter.hbm import Drafts, pool_planes
from sglang_ext.patches.adapter.hybrid.sharing import Part, Sharing, of_attention, side_states

STATE = Component("state", AtSnapshot())
WINDOW = "window"
"""Name of a window's component."""
_NO_DRAFTS = Drafts()


@dataclass(frozen=True)
class PlaneRows:
    """A tensor as rows of bytes, as `tiered_store.copy.PoolCopier` reads a plane."""

    address: int
    slot_stride: int
    row_bytes: int


@dataclass(frozen=True)
class ComponentPool:
    """One component's tensors.

    planes: by layer, each uint8 of shape (rows, row bytes); all have the same number of rows.
    block_rows: rows of each plane in a block.
    row_slots: slots of SGLang's allocator in a row: 1, or those of a page.
    facts: further properties that the bytes depend on.
    sharing: how ranks share the rows; None where each has rows of its own, which another number of ranks
        cannot read.
    """

    component: Component
    planes_by_layer: list[list[torch.Tensor]]
    block_rows: int
    row_slots: int = 1
    facts: str = ""
    sharing: Sharing | None = None

    @property
    def layout(self) -> BlockLayout:
        layers = tuple(tuple(plane.shape[1] for plane in layer) for layer in self.planes_by_layer)
        return BlockLayout(self.block_rows, layers)

    @property
    def planes(self) -> tuple[PlaneRows, ...]:
        return tuple(
            PlaneRows(plane.data_ptr(), plane.stride(0), plane.shape[1])
            for layer in self.planes_by_layer
            for plane in layer
        )

    @property
    def slots(self) -> int:
        """Rows of each plane."""
        return len(self.planes_by_layer[0][0])

    @property
    def device(self) -> torch.device:
        return self.planes_by_layer[0][0].device

    def described(self, ranks: int) -> str:
        """The properties that two ranks must share to exchange blocks, in a short text.

        Args:
            ranks: of the instance, each of which has a part of the model.
        """
        if self.sharing is None:
            rows, size, whose = self.layout.facts(), self.layout.block_bytes, f"those of one of {ranks} ranks"
        else:
            parts = [part.of_all(ranks) for part in self.sharing]
            rows, whose = f"{self.block_rows} rows of {parts}", "of all ranks"
            size = self.block_rows * sum(max(1, heads) * width for _, heads, width in parts)
        text = f"{rows};{self.facts};{self.component.coverage}"
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        return f"{len(self.planes)} planes, blocks of {size} bytes, {whose} ({digest})"

    def spec(self, name: str, rank: int, ranks: int) -> PoolSpec:
        """As an endpoint's pool of blocks. Every block may be leased; the caller that offers it holds it.

        Each part of a row is described as a layer. Where each of the ranks has rows of its own, such a row is
        one head of so many: a rank's blocks come from the same rank of a peer, and a peer with another number
        of ranks is refused.
        """
        planes = self.planes
        whole = tuple(
            Part(number, 0, 1, plane.row_bytes, plane.row_bytes) for number, plane in enumerate(planes)
        )
        parts = whole if self.sharing is None else self.sharing
        tensors = tuple(self._tensor(number, planes[part.plane], part) for number, part in enumerate(parts))
        kind = MemoryKind.HOST if self.device.type == "cpu" else MemoryKind.CUDA
        memory = tuple(
            MemoryRange(plane.data_ptr(), plane.nbytes, kind, keep=plane)
            for layer in self.planes_by_layer
            for plane in layer
        )
        blocks = self.slots // self.block_rows
        # Heads are counted as those of the first part; ranks share those of all parts alike.
        heads = next((part.heads for part in parts if part.heads), 0)
        of_ranks = (rank * heads, heads, len(tensors), ranks * heads) if heads else (0, 1, len(tensors), 1)
        shard = Shard(0, len(tensors), *of_ranks)
        return PoolSpec(name, blocks, self.block_rows, tensors, shard, memory, blocks, borrowed=True)

    def _tensor(self, number: int, plane: PlaneRows, part: Part) -> TensorMeta:
        return TensorMeta(
            number,
            PlaneKind.K if part.heads else PlaneKind.LATENT,
            plane.address + part.offset,
            (TOKEN_DIM, HEAD_DIM, ELEMENT_DIM),
            (self.slots, max(1, part.heads), part.width),
            (plane.slot_stride, part.stride, 1),
            "uint8",
        )

    def rows(self, slots: torch.Tensor) -> Any:
        """Rows of slots that are whole blocks: an array where the pool is in host memory, else a tensor."""
        rows = slots if self.row_slots == 1 else slots[:: self.row_slots] // self.row_slots
        return rows.numpy() if self.device.type == "cpu" else rows


Layers = list[list[torch.Tensor]]
ShareStates = Callable[[Any], Sharing | None]


def has_components(ctx: Any) -> bool:
    """Whether a model keeps other things than a row for each token, all in one pool.

    Args:
        ctx: SGLang's ``TreeCacheBuildContext``. A DeepSeek V4.1 that computes its windows again is no hybrid
            there.
    """
    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    compressed = type(kvcache).__name__ == "DeepSeekV4TokenToKVPool"
    return bool(ctx.is_hybrid_swa or ctx.is_hybrid_ssm or compressed)


def component_pools(
    params: Any,
    window_tokens: int | None,
    drafts: Drafts = _NO_DRAFTS,
    states: ShareStates = lambda mamba_pool: None,
) -> list[ComponentPool]:
    """The pools of a model's components, `FULL` first, with the layers of its draft models.

    Args:
        params: SGLang's ``CacheInitParams``.
        window_tokens: tokens of the sliding window that SGLang's tree keeps; None without one.
        states: how ranks share the rows of SGLang's pool of states.

    Raises:
        ConfigError: a pool is of a kind whose rows do not hold everything that SGLang reads.
    """
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool, page = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    of_drafts = DraftLayers.of(drafts, params, window_tokens)
    if type(pool) is DeepSeekV4TokenToKVPool:
        return _compressed_pools(pool, params, window_tokens, of_drafts)
    if type(pool) is SWAKVPool:
        assert window_tokens is not None
        window = Component(WINDOW, LastWindow(window_tokens))
        found = [
            _kv(FULL, _layers(pool.full_kv_pool), of_drafts.full, page),
            _kv(window, _layers(pool.swa_kv_pool), of_drafts.window, page),
        ]
    elif _beside_states(pool):
        found = [_kv(FULL, _layers_beside_states(pool), of_drafts.full, page)]
    else:
        raise _unsupported(f"KV pools of the kind {type(pool).__name__}")
    if hasattr(params.req_to_token_pool, "mamba_pool"):
        found.append(_state(params.req_to_token_pool, states))
    return found


def _layers(pool: Any) -> Layers:
    return pool_planes(pool, by_page=True)


def _beside_states(pool: Any) -> bool:
    """Whether this is the pool of layers with attention in a model with recurrent layers."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return type(pool) is HybridLinearKVPool or type(pool).__name__ == QSA_POOL


def _layers_beside_states(pool: Any) -> Layers:
    """The planes of such a pool. QSA has an index key for each group of tokens beside K and V, and a page has
    whole groups: a slot has an equal part of the key's bytes."""
    layers = _layers(pool.full_kv_pool)
    if type(pool).__name__ != QSA_POOL:
        return layers
    slots, group = len(layers[0][0]), pool.qsa_compress_ratio
    for layer, keys in zip(layers, pool.qsa_compressed_k_buffer_pool, strict=True):
        row_bytes, rest = divmod(keys[0].nbytes, group)
        if rest:
            raise _unsupported(f"index keys of {keys[0].nbytes} bytes for groups of {group} tokens")
        layer.append(rows_of_bytes(keys).view(-1, row_bytes)[:slots])
    return layers


def _kv(component: Component, layers: Layers, of_drafts: Layers, page: int) -> ComponentPool:
    slots = len(layers[0][0])
    if any(len(plane) < slots for layer in of_drafts for plane in layer):
        raise _unsupported("draft models that have fewer slots than the model")
    planes = layers + of_drafts
    rows = [[rows_of_bytes(plane) for plane in layer] for layer in planes]
    return ComponentPool(component, rows, page, sharing=of_attention(planes))


@dataclass(frozen=True)
class DraftLayers:
    """The planes of draft models, by the component whose slots they have."""

    full: Layers
    window: Layers

    @staticmethod
    def of(drafts: Drafts, params: Any, window_tokens: int | None) -> DraftLayers:
        """The layers of these draft models; arguments and errors as for `component_pools`."""
        found = DraftLayers([], [])
        for runner in drafts.runners:
            found._add(runner, params, window_tokens)
        return found

    def _add(self, runner: Any, params: Any, window_tokens: int | None) -> None:
        from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        pool = runner.token_to_kv_pool
        states = getattr(runner.req_to_token_pool, "mamba_pool", None)
        if states is not getattr(params.req_to_token_pool, "mamba_pool", None):
            raise _unsupported("draft models with states of their own")
        if not isinstance(pool, BaseSWAKVPool):
            self.full.extend(_layers_beside_states(pool) if _beside_states(pool) else _layers(pool))
            return
        of_window = self.window
        if pool.swa_req_ring_size is not None or pool.request_window is not None:
            raise _unsupported("draft models that keep the KV of their window by request")
        if pool.swa_uses_full_indices:
            of_window = self.full
        elif not _has_windows_slots(pool, params):
            raise _unsupported("draft models whose window has slots of its own")
        elif window_tokens is None or (runner.sliding_window_size or 0) > window_tokens:
            raise _unsupported("draft models with a longer window than the model's")
        if type(pool) is SWAKVPool:
            self.full.extend(_layers(pool.full_kv_pool))
            of_window.extend(_layers(pool.swa_kv_pool))
        elif any(pool.compression_ratios):
            raise _unsupported("draft models with compressed KV")
        else:
            of_window.extend([rows_of_bytes(plane)] for plane in pool.swa_kv_pool.kv_buffer)


def _has_windows_slots(pool: Any, params: Any) -> bool:
    """Whether a draft's window is read and written at the slots of the model's window."""
    mapping = getattr(params.token_to_kv_pool_allocator, "full_to_swa_index_mapping", None)
    return mapping is not None and pool.full_to_swa_index_mapping is mapping


def _state(req_to_token_pool: Any, states: ShareStates) -> ComponentPool:
    """The convolution windows and the recurrent states of all layers, by slot. Other layers may use the same
    slots for windows of short convolutions, and the model for its last tokens, by which it looks up n-grams
    (Qwen3.8-Flash-Next): these tensors come before those of the first layer."""
    if req_to_token_pool.mamba_ckpt_pool is not None:
        raise _unsupported("int8 checkpoints of states")
    (info,) = req_to_token_pool.mamba_pool.get_device_pool_infos()
    beside = side_states(info)
    buffers = [each for each in (info.buffer_info.temporal, *info.buffer_info.conv) if each.numel()]
    layers = [[rows_of_bytes(buffer[layer]) for buffer in buffers] for layer in range(len(info.layer_ids))]
    layers[0][:0] = [rows_of_bytes(buffer) for buffer in beside]
    return ComponentPool(
        STATE,
        layers,
        1,
        facts=",".join(str(buffer.dtype) for buffer in (*beside, *buffers)),
        sharing=states(req_to_token_pool.mamba_pool),
    )


def _compressed_pools(
    pool: Any, params: Any, window_tokens: int | None, of_drafts: DraftLayers
) -> list[ComponentPool]:
    """DeepSeek V4: compressed latents and their index keys by page, and the window with the states of
    unfinished groups by page of the window. SGLang's own list of its tensors for external stores is used.

    Args:
        window_tokens: None where SGLang keeps the windows of running requests only, and computes that of a
            resumed prompt again (``--enable-encoder-swa-bounded-replay``).
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    sources = {FULL: PoolName.KV}
    components = {ComponentType.FULL}
    if window_tokens is not None:
        sources[Component(WINDOW, LastWindow(window_tokens))] = PoolName.SWA
        components.add(ComponentType.SWA)
    try:
        group = resolve_hybrid_device_pool_group(
            kvcache=pool, page_size=params.page_size, params=params, components=components
        )
    except ValueError as error:
        raise _unsupported(f"this form of the pool of DeepSeek V4 ({error})") from None
    if of_drafts.full:
        raise _unsupported("draft models of DeepSeek V4 that attend to every token")
    of_windows = [rows_of_bytes(plane) for layer in of_drafts.window for plane in layer]
    return [
        _pages(
            component,
            [entry for entry in group.entries if entry.indices_from_pool == source],
            [] if component == FULL else of_windows,
            params,
        )
        for component, source in sources.items()
    ]


def _pages(
    component: Component, entries: Sequence[Any], of_drafts: Sequence[torch.Tensor], params: Any
) -> ComponentPool:
    """Tensors with one row for each page. Layers of a block are in the order of the tensors."""
    planes = [*(rows_of_bytes(buffer) for entry in entries for buffer in entry.kv_buffer), *of_drafts]
    rows = min(len(plane) for plane in planes)
    return ComponentPool(component, [[plane[:rows]] for plane in planes], 1, row_slots=params.page_size)


def rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of bytes, without a copy.

    Raises:
        ConfigError: a row is not contiguous, as states on a CPU with AMX.
    """
    if len(tensor) and not tensor[0].is_contiguous():
        raise _unsupported("rows of a pool that are not contiguous, as states on a CPU with AMX")
    rows = tensor.view(len(tensor), -1)
    return rows.view(torch.uint8)


def _unsupported(kind: str) -> ConfigError:
    return ConfigError(
        f"the tiers of the global cache do not support {kind}",
        field=FLAG,
        hint="Leave the flag out to serve this model with SGLang's own cache",
    )
