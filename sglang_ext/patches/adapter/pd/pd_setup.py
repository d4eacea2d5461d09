"""Reads metadata rows, weights and limits from SGLang when the backend `global` starts."""

from __future__ import annotations

import copy
import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from sglang.srt.runtime_context import get_parallel

from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.config import KvConfig
from sglang_ext.disagg.transfer.control import MemberKeys
from sglang_ext.engine.model_identity import config_digest, element_sums, kv_dtype, model_digest
from sglang_ext.engine.model_settings import model_settings
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.process import PROCESS

log = logging.getLogger(__name__)


def keys_of(config: KvConfig) -> MemberKeys | None:
    """The cluster's keys, or None, with which nothing listens beyond loopback.

    Raises:
        ConfigError: the key file cannot be used.
    """
    path = getattr(config, "cluster_key_file", None)
    if not path:
        return None
    return read_cluster_key(path, field="--kv-cluster-key-file")


class MetadataBuffers:
    """SGLang's metadata buffers as rows of bytes: first token, log probabilities, counts."""

    def __init__(self, pointers: list[int], item_bytes: list[int]) -> None:
        self._buffers = list(zip(pointers, item_bytes, strict=True))
        self.row_bytes = sum(item_bytes)

    def read(self, row: int) -> bytes:
        """One row, buffer after buffer."""
        return b"".join(ctypes.string_at(at + row * size, size) for at, size in self._buffers)

    def write(self, row: int, metadata: bytes) -> None:
        """Fill one row. Its last buffer holds bootstrap_room, by which SGLang sees that the row is complete.

        Raises:
            ValueError: it has another size.
        """
        if len(metadata) != self.row_bytes:
            raise ValueError(f"a metadata row has {self.row_bytes} bytes, got {len(metadata)}")
        start = 0
        for at, size in self._buffers:
            ctypes.memmove(at + row * size, metadata[start : start + size], size)
            start += size


class ScratchRow:
    """One metadata row outside SGLang's buffers, laid out as theirs: no request and no transfer uses it.

    Args:
        buffers: SGLang's ``MetadataBuffers``.
    """

    def __init__(self, buffers: Any) -> None:
        self.buffers = copy.copy(buffers)
        """As SGLang's, with one row of zeros."""
        for name, value in vars(buffers).items():
            if isinstance(value, torch.Tensor):
                setattr(self.buffers, name, torch.zeros_like(value[:1]))

    def read(self) -> bytes:
        """The row, buffer after buffer."""
        pointers, _, item_bytes = self.buffers.get_buf_infos()
        return MetadataBuffers(pointers, item_bytes).read(0)


def around_layers(
    kvcache: Any,
    *,
    before: Callable[[int], None] = lambda layer: None,
    after: Callable[[int], None] = lambda layer: None,
) -> None:
    """Call something whenever the pool is given a layer's KV. With the layer, in the whole model. A pool in
    host memory has it afterwards; on a device, the write is launched. Captured graphs call nothing."""
    for name in ("set_kv_buffer", "set_mla_kv_buffer"):
        stock = getattr(kvcache, name, None)
        if stock is None:
            continue

        def announced(layer: Any, *args: Any, _stock: Any = stock, **kwargs: Any) -> Any:
            before(layer.layer_id)
            result = _stock(layer, *args, **kwargs)
            after(layer.layer_id)
            return result

        setattr(kvcache, name, announced)


def settings_of(model_config: Any, kvcache: Any, drafts: Drafts) -> dict[str, str]:
    """The settings of the model with which KV is computed, the dtype and layout that hold it, and the draft
    models."""
    from sglang.srt.runtime_context import get_spec

    return model_settings(model_config.hf_config) | {
        "kv_cache_dtype": kv_dtype(model_config, kvcache.dtype),
        "speculative_algorithm": str(get_spec().speculative_algorithm),
        "draft_model": " ".join(config_digest(config) for config in drafts.configs) or "none",
    }


def weights_of(scheduler: Any) -> str:
    """The digest of the weights of the whole model, and of its draft models, as they are now; empty where a
    rank cannot read its part. Called in all ranks at once, and never raises.
    """
    # With DP attention, replicas share all layers but attention.
    parallel = get_parallel()
    group = parallel.tp_group.cpu_group if parallel.attn_dp_size > 1 else instance_group(scheduler)
    return digest_of(on_all_ranks(part_of_weights(scheduler), group))


def part_of_weights(scheduler: Any) -> bytes:
    """A rank's message to the others about its present weights. Never raises."""
    pipelined, tied = get_parallel().pp_size > 1, scheduler.model_config.hf_config.tie_word_embeddings
    try:
        sums = dict(element_sums(scheduler.tp_worker.model_runner.model))
        if pipelined and tied:
            # The last stage has a copy of the embeddings, which a model in one piece has once.
            sums = {name: part for name, part in sums.items() if not name.startswith("lm_head.")}
        for number, draft in enumerate(Drafts(PROCESS.drafts).models):
            sums |= {f"draft {number} {name}": part for name, part in element_sums(draft).items()}
    except Exception:
        log.exception("the weights cannot be read; no KV is exchanged until they are updated")
        sums = {}
    return msgspec.json.encode({name: [str(part) for part in sum_] for name, sum_ in sums.items()})


def digest_of(parts: Sequence[bytes]) -> str:
    """The digest of the weights of a model of which each rank has sent its part."""
    ranks = [msgspec.json.decode(each) for each in parts]
    if not all(ranks):
        return ""
    return model_digest([{name: (int(s), int(n)) for name, (s, n) in rank.items()} for rank in ranks])


class InUse:
    """The weights that hand-overs of this rank go by, which may change. In the scheduler's thread.

    Stages of a pipeline load new weights one after the other: the others get the request that changes them
    when this one has answered it. So these compare their parts in the background.

    Args:
        group: of the stages' ranks, for this only; None without stages, whose ranks change all at once.
        use: takes the digest; empty while weights change, or the stages have not compared them.
    """

    def __init__(self, scheduler: Any, group: Any, use: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._group = group
        self._use = use
        self._lock = threading.Lock()
        self._changes = 0
        self._comparing: threading.Thread | None = None

    def changing(self) -> None:
        """The weights are about to change, and may until `changed`."""
        with self._lock:
            self._changes += 1
            self._use("")

    def changed(self) -> None:
        """The weights stay as they are now. On all ranks, as often and in the same order."""
        if self._group is None:
            self._use(weights_of(self._scheduler))
            return
        self._comparing = threading.Thread(
            target=self._compare,
            args=(self._comparing, self._changes, part_of_weights(self._scheduler)),
            name="kv-pd-weights",
            daemon=True,
        )
        self._comparing.start()

    def _compare(self, earlier: threading.Thread | None, changes: int, part: bytes) -> None:
        if earlier is not None:
            earlier.join()
        try:
            digest = digest_of(on_all_ranks(part, self._group))
        except Exception:
            log.exception(
                "the stages cannot compare their weights; no KV is exchanged until they are updated"
            )
            return
        with self._lock:
            if changes == self._changes:
                self._use(digest)


def instance_group(scheduler: Any) -> Any:
    """All ranks of this process's instance; None where there is one."""
    parallel = get_parallel()
    if parallel.pp_size > 1:
        return scheduler.world_group.cpu_group
    return scheduler.attn_tp_cpu_group if parallel.attn_tp_size > 1 else None


def on_all_ranks(data: bytes, group: Any) -> list[bytes]:
    """The bytes of each rank of a group, in the order of ranks. They must not end in zeros."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return [data]
    longest = torch.tensor([len(data)])
    torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX, group=group)
    mine = torch.frombuffer(bytearray(data.ljust(max(1, int(longest)), b"\0")), dtype=torch.uint8)
    said = [torch.zeros_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(said, mine, group=group)
    return [each.numpy().tobytes().rstrip(b"\0") for each in said]
