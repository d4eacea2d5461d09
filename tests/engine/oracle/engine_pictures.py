"""Prompts with pictures: each of their tokens has an id that SGLang makes from a hash of the content."""

from __future__ import annotations

import numpy as np
import torch
from engine_simulation import Traffic
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

from sglang_ext.patches.hooks.wide_pads import around_pad


def pad_of(content: int, modality: Modality = Modality.IMAGE) -> int:
    """The id of the tokens of a picture, a video or a sound: SGLang's own, with our hook around it."""
    values = np.random.default_rng(content).integers(0, 256, (16, 6), dtype=np.uint8)
    item = MultimodalDataItem(modality=modality, feature=torch.from_numpy(values))
    around_pad(MultimodalDataItem.set_pad_value, item)
    assert item.pad_value is not None
    return int(item.pad_value)


class PicturedTraffic(Traffic):
    """Traffic in which half of the drawn texts have pictures, one of three each time."""

    pads = tuple(pad_of(content) for content in (1, 2, 3))

    def _words(self, count: int) -> list[int]:
        words = super()._words(count)
        while words and self.random.random() < 0.5:
            first = self.random.randrange(len(words))
            end = first + self.random.randrange(1, 24 * self._stretch)
            words[first:end] = [self.random.choice(self.pads)] * len(words[first:end])
        return words
