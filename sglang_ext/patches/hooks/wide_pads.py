"""Pad ids of pictures that keep the whole hash of their content and its shape.

Change: in a prompt, SGLang puts a hash of the content in place of each token of a picture, a video or a
sound: the pad of the item. Up to 0.5.22 a pad has 30 bits of the hash. Two pictures whose hashes agree in
these bits have one key, and the request about the second would be answered from the KV of the first. After
``set_hash`` and ``set_pad_value``, a pad that is not a wide id (``sglang_ext.keys``) is made anew from all 64
bits. SGLang 0.5.23 makes wide pads itself. There, only pads that come with precomputed content are changed.
SGLang's hash covers the values that the processor made, and not their grid, nor the times of a video's
frames. Positions depend on both: two pictures of one color and size, one wide and one high, have one hash and
other KV. So the first pad of an item is made from both (``SHAPE``).

Why no extension point serves: there is none for hashes of content.

For: any device, in the tokenizer's process and in schedulers, which find the pad that the first of them made.
Can go: when 0.5.22 is no longer supported, pads that come with content are refused, and SGLang hashes shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ext.keys import MAX_TOKEN
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import MultimodalDataItem

_ITEM = "sglang.srt.managers.schedule_batch.MultimodalDataItem"
_BITS = 61
_FLAG = 1 << _BITS
"""Set in each pad: a pad is never a text token's id, and always below 2^62."""


def wide_pad(content_hash: int) -> int:
    """The pad of a content's 64-bit hash, a wide id."""
    digest = hashlib.sha256(b"sglang-ext-wide-pad" + content_hash.to_bytes(8, "big")).digest()
    return _FLAG | (int.from_bytes(digest[:8], "big") & (_FLAG - 1))


SHAPE = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid")
"""Attributes of an item, beside its values, by which positions of its tokens are computed."""


def around_pad(stock: Callable[[MultimodalDataItem], None], item: MultimodalDataItem) -> None:
    """Around ``set_pad_value``, which leaves a pad that is there as it is."""
    is_new = item.pad_value is None
    stock(item)
    shape = {name: value for name in SHAPE if (value := item.model_specific_data.get(name)) is not None}
    if is_new and shape and item.hash is not None:
        facts = json.dumps([item.hash, shape], default=lambda numbers: numbers.tolist()).encode()
        item.set_hash(int.from_bytes(hashlib.sha256(facts).digest()[:8], "big"))
    after_pad(None, item)


def after_pad(_result: None, item: MultimodalDataItem, *_args: Any, **_kwargs: Any) -> None:
    """After ``set_hash``."""
    if item.pad_value is not None and item.pad_value <= MAX_TOKEN and item.hash is not None:
        item.pad_value = wide_pad(item.hash)


PATCH = hook_patch(
    "wide_pads",
    "pads of pictures have the whole hash of their content, not 30 bits",
    Hook(f"{_ITEM}.set_hash", "after", after_pad),
    Hook(f"{_ITEM}.set_pad_value", "around", around_pad),
)
