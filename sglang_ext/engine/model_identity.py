"""What a server computes KV with, as a text that two servers share only if their KV is interchangeable.

It is taken from the weights in memory, not from a path or a file: a checkpoint that was replaced under the
same name, a quantisation, merged adapters or random weights from another seed must not find older KV. Every
byte of every tensor counts, so that a change of a few rows is seen too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

_CHUNK = 1 << 22
"""Bytes summed at once; bounds the temporary memory on the device."""

_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "architectures_path"})


def weights_digest(model: torch.nn.Module) -> str:
    """A digest of all parameters and buffers of a rank's model: names, shapes, dtypes, bytes."""
    digest = hashlib.blake2b(digest_size=16, person=b"kv-weights")
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sums(tensor)}\n".encode())
    return digest.hexdigest()


def config_digest(hf_config: Any) -> str:
    """A digest of a model's configuration: what the weights do not say (scaling of positions, norms)."""
    facts = {key: value for key, value in hf_config.to_dict().items() if key not in _VOLATILE}
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kv-config").hexdigest()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from sorted(model.named_parameters(), key=lambda item: item[0])
    yield from sorted(model.named_buffers(), key=lambda item: item[0])


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
