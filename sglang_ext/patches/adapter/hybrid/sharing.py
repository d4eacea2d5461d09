"""How the ranks of a server share the rows of a component's tensors, so that a server with another number of
ranks can read its part of a row from each.

Ranks share the KV heads of attention, the heads of a recurrent state, and the channels of each part of a
convolution: of queries, keys and values, or of Mamba2's inputs, B and C. Latents are whole in each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

_MAMBA2: Final = frozenset(
    {"FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "Mamba2ForCausalLM"}
)
"""Models whose convolution has inputs, B and C, in this order. SGLang lists the parts for other models."""


@dataclass(frozen=True)
class Part:
    """A part of each row of a plane, in bytes.

    plane: its number. offset: of the first byte. heads: of this rank; 0 where each rank has all of it.
    stride: from head to head. width: of a head.
    """

    plane: int
    offset: int
    heads: int
    stride: int
    width: int

    def of_all(self, ranks: int) -> tuple[int, int, int]:
        """The properties that ranks of servers of any size have in common."""
        return self.plane, self.heads * ranks, self.width


Sharing = tuple[Part, ...]
"""All parts of a row, in the order of planes and of their bytes."""


def of_attention(layers: Sequence[Sequence[torch.Tensor]]) -> Sharing:
    """Of planes as ``hbm.pool_planes`` returns them: K and V have heads, latents and index keys have none."""
    found: list[Part] = []
    for layer in layers:
        has_heads = len(layer) > 1 and layer[1].dim() == 3
        for plane in layer:
            row = plane[0].nbytes
            heads = plane.shape[1] if has_heads and plane.dim() == 3 else 0
            width = row // max(1, heads)
            found.append(Part(len(found), 0, heads, width, width))
    return tuple(found)


def side_states(info: Any) -> Sequence[torch.Tensor]:
    """The tensors with a row for each slot of a state, of layers without a recurrent state.

    Args:
        info: of SGLang's pool of states; its field for them is there from 0.5.22 on.
    """
    found: Sequence[torch.Tensor] = getattr(info.buffer_info, "extra_checkpoint_buffers", ())
    return found


def of_states(mamba_pool: Any, convolution: Sequence[int] | None, ranks: int) -> Sharing | None:
    """Of the planes of a pool of states: the side states, which each rank has all of, and of each layer the
    recurrent state and the convolutions, where the model has them. None where the ranks do not share a
    convolution by its parts.

    Args:
        convolution: channels of the parts of a convolution in all ranks; None for those that SGLang lists.
        ranks: of the server.
    """
    (info,) = mamba_pool.get_device_pool_infos()
    temporal, convolutions = info.buffer_info.temporal, info.buffer_info.conv
    listed = mamba_pool.conv_shard_groups or convolution
    widths = [buffer[0].nbytes for buffer in side_states(info)]
    found = [Part(plane, 0, 0, width, width) for plane, width in enumerate(widths)]
    planes = len(found)
    for _ in info.layer_ids:
        if temporal.numel():
            row = temporal[0][0]
            found.append(Part(planes, 0, len(row), row[0].nbytes, row[0].nbytes))
            planes += 1
        for conv in convolutions:
            if not conv.numel():
                continue
            row = conv[0][0].movedim(mamba_pool.conv_slice_axis, 0)
            channels = len(row) * ranks
            sizes = listed or ([] if temporal.numel() else [channels])
            if sum(sizes) != channels or any(size % ranks for size in sizes):
                return None
            found += _of_convolution(planes, row, [size // ranks for size in sizes if size])
            planes += 1
    return tuple(found)


def _of_convolution(plane: int, row: torch.Tensor, sizes: Sequence[int]) -> Iterator[Part]:
    """The parts of a row of shape (channels, taps), in the order of their bytes."""
    channel, tap = (step * row.element_size() for step in row.stride())
    starts = [0, *accumulate(sizes)]
    if tap < channel:  # the taps of a channel lie side by side
        for start, size in zip(starts, sizes, strict=False):
            yield Part(plane, start * channel, size, channel, channel)
        return
    for at in range(row.shape[1]):
        for start, size in zip(starts, sizes, strict=False):
            yield Part(plane, at * tap + start * channel, size, channel, channel)


def convolution_of(model_config: Any) -> tuple[int, ...] | None:
    """The channels of the parts of a model's convolution in all ranks, where SGLang does not list them."""
    config = getattr(model_config.hf_config, "text_config", None) or model_config.hf_config
    if not _MAMBA2 & set(getattr(model_config.hf_config, "architectures", None) or ()):
        return None
    shape = config.mamba2_cache_params.shape
    groups = (shape.conv_dim - shape.intermediate_size) // 2
    return shape.intermediate_size, groups, groups
