"""The identity of a model's KV: a text that two servers share only if their KV is interchangeable.

It is taken from the weights in memory, not from a path or a file: a checkpoint that was replaced under the
same name, a quantisation, merged adapters or random weights from another seed must not find older KV. Every
byte of every tensor counts, so that a change of a few rows is seen too, and so do the scales of the KV cache,
which are attributes where they come from ``--quantization-param-path``. Buffers that are not part of a
checkpoint follow from the configuration, and may grow while a server runs; they do not count.

There are two digests. ``weights_digest`` is of one rank's tensors, each word by its place: names on disk,
which are a rank's own, are made with it. ``model_digest`` is of the whole model, and the same however many
ranks share it: prefill and decode compare it. It is made from sums over elements, which do not depend on how
a tensor is cut or repeated: of each tensor the mean of its words' hashes, as a fraction. It does not see
elements that change their places within a tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import torch

from sglang_ext.engine.model_settings import VOLATILE

_CHUNK = 1 << 22
"""Bytes summed at once; bounds the temporary memory on the device."""
_WORDS: Final = 1 << 22
"""Counted at once; each takes 8 bytes then."""
_HASH: Final = (1 << 28) - 1
"""So large is a word's hash at most: the sum over a tensor of 2^34 words stays exact."""

_KV_SCALE: Final = re.compile(r"(?:^|_)(?:k|v|q|kv)_scale")
"""Attributes of attention layers that scale values before they enter the KV cache."""


def kv_dtype(model_config: Any, dtype: object) -> str:
    """The dtypes in which KV is computed and stored.

    Args:
        model_config: SGLang's. The same quantised weights give other KV where activations are quantised too,
            which is a matter of the method.
        dtype: of the KV cache.
    """
    method = getattr(model_config, "quantization", None)
    return f"{model_config.dtype} {dtype}" + (f" {method}" if method else "")


Sums = Mapping[str, tuple[int, int]]
"""Of each tensor: the sum of its nonzero words' hashes, and the number of these words."""


def weights_digest(model: torch.nn.Module, *drafts: torch.nn.Module) -> str:
    """A digest of all weights of a rank's model and of its draft models: names, shapes, dtypes, bytes."""
    digest = hashlib.blake2b(digest_size=16, person=b"kv-weights")
    for part in (model, *drafts):
        for name, tensor in _tensors(part):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sums(tensor)}\n".encode())
    return digest.hexdigest()


def element_sums(model: torch.nn.Module) -> Sums:
    """A rank's contribution to ``model_digest``.

    Zeros do not count: a vocabulary is padded with them, by the number of ranks. The fused projection of
    queries, keys and values is taken apart, because its ranks share the queries, and may repeat the others.
    """
    modules = dict(model.named_modules())
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in _tensors(model):
        owner = modules.get(name.rpartition(".")[0])
        for part, values in _parts(owner, tensor):
            found[f"{name}{part} {values.dtype}"] = _element_sum(values)
    return found


def model_digest(ranks: Sequence[Sums]) -> str:
    """A digest of the whole model, from all ranks that share it."""
    digest = hashlib.blake2b(digest_size=16, person=b"kv-model")
    for name in sorted(set().union(*ranks)):
        shares = [sums[name] for sums in ranks if name in sums]
        total, count = (sum(column) for column in zip(*shares, strict=True))
        digest.update(f"{name} {Fraction(total, count or 1)}\n".encode())
    return digest.hexdigest()


def config_digest(hf_config: Any, *drafts: Any) -> str:
    """A digest of the configurations of a model and of its draft models, for settings that the weights do not
    show (scaling of positions, norms).
    """
    text = "".join(_as_text(config) for config in (hf_config, *drafts))
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kv-config").hexdigest()


def _as_text(hf_config: Any) -> str:
    facts = {key: value for key, value in hf_config.to_dict().items() if key not in VOLATILE}
    return json.dumps(facts, sort_keys=True, default=str)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers of the checkpoint, and scales of the KV cache, by their names."""
    yield from sorted(model.named_parameters(), key=lambda item: item[0])
    derived = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name not in derived)
    yield from sorted(buffers, key=lambda item: item[0])
    yield from sorted(_kv_scales(model), key=lambda item: item[0])


def _kv_scales(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Scales that are neither parameters nor buffers, as tensors."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if not _KV_SCALE.search(name):
                continue
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", value
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield f"{prefix}.{name}", torch.tensor(float(value), dtype=torch.float64)


def _parts(owner: Any, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor in parts that ranks either share or repeat: queries, keys and values of SGLang's
    ``QKVParallelLinear``, the two kinds of columns of its ``MergedColumnParallelRepeatedLinear`` (KDA), or
    all of it."""
    if tensor.dim() and hasattr(owner, "num_column_parallel"):
        sizes, shared = owner.output_partition_sizes, owner.num_column_parallel
        if tensor.shape[0] == sum(sizes):
            shares = [sum(sizes[:shared]), sum(sizes[shared:])]
            yield from zip((".shared", ".repeated"), tensor.split(shares), strict=True)
            return
    names = ("q_proj_shard_size", "kv_proj_shard_size", "v_proj_shard_size")
    if tensor.dim() and all(hasattr(owner, name) for name in names):
        sizes = [int(getattr(owner, name)) for name in names]
        for dim in range(tensor.dim()):
            # Packed or scaled in groups, its rows are a part of the outputs.
            if tensor.shape[dim] == sum(sizes):
                for name, part in zip("qkv", tensor.split(sizes, dim), strict=True):
                    yield f".{name}", part
                return
    yield "", tensor


def _element_sum(tensor: torch.Tensor) -> tuple[int, int]:
    """Sum of the hashes of a tensor's nonzero words, and their number. A word is an element, or one half or
    quarter of it, of two bytes. Words are counted by value, which is faster than hashing each."""
    data = tensor.detach().contiguous().reshape(-1)
    # Signed: few operations support unsigned words on every device.
    words = data.view(torch.int8 if data.element_size() == 1 else torch.int16)
    values = 256 if words.dtype == torch.int8 else 1 << 16
    counts = torch.zeros(values, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS].to(torch.int64)
        counts += torch.bincount(part.bitwise_and_(values - 1), minlength=values)
    counts[0] = 0
    hashes = _factors(values, words.device) & _HASH
    return int((counts * hashes).sum()), int(counts.sum())


def _sums(tensor: torch.Tensor) -> list[int]:
    """Per chunk of the tensor's bytes, a sum that depends on each word and on its place."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padding = -data.numel() % 8
    if padding:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int64)
    factors = _factors(min(words.numel(), _CHUNK // 8), words.device)
    sums = [
        (part * factors[: part.numel()]).sum()
        for start in range(0, words.numel(), factors.numel() or 1)
        if (part := words[start : start + factors.numel()]).numel()
    ]
    return torch.stack(sums).tolist() if sums else []


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, one for each place, the same in every process. Products and sums wrap at 64 bits."""
    place = torch.arange(count, dtype=torch.int64, device=device)
    mixed = place * -7046029254386353131  # 2^64 over the golden ratio, as a signed number
    return (mixed ^ (mixed >> 29)) | 1
