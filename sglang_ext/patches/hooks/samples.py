"""Give each sample of a prompt (``n`` above 1) a hand-over of its own.

Change: SGLang sends a prompt of several samples to its scheduler once more than it has samples: first a
request without output, which computes the prefix that all samples share, then one request per sample. All of
them get the prompt's ``bootstrap_room``, but a room is one hand-over between prefill and decode: the second
request of a room was refused. Two hooks, in the tokenizer process of either server:

- after ``GenerateReqInput.__getitem__``, which makes the request of one prompt of a batch: a request that
  will be sampled several times gets a counter, which the copies that SGLang makes of it share;
- before ``_send_one_request``: the first request of a room keeps it, the others get rooms derived from it.
  Both servers expand the same body in the same order, and so derive the same rooms.

Where decode keeps KV (``--kv-pd-caching`` 2 and 3), it keeps that of the first request; the samples then
transfer only the tokens after the last whole block.

Why no extension point serves: the requests of a batch are made inside the tokenizer manager.

Can go: when SGLang gives every sample a room.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

from sglang_ext.patches.plugin_hooks import Hook, hook_patch

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_SENT: Final = "sglang_ext_sent"
"""Attribute of a prompt's request: counts the requests that were sent of it."""
HANDOVERS: Final = 1 << 62
"""Derived numbers are 1 to this; SGLang keeps a ``bootstrap_room`` in 63 bits."""


def handover_of(handover: int, number: int) -> int:
    """The ``bootstrap_room`` of a prompt's request.

    Args:
        handover: the ``bootstrap_room`` of the prompt, as the client or a router chose it.
        number: of the request, in the order in which they are sent: 0 keeps the prompt's.
    """
    if number == 0:
        return handover
    name = handover.to_bytes(8, "little") + number.to_bytes(4, "little")
    return 1 + int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") % HANDOVERS


def after_getitem(request: Any, prompts: Any, i: int) -> None:
    """After ``GenerateReqInput.__getitem__``."""
    if prompts.parallel_sample_num > 1 and request.bootstrap_room is not None and not hasattr(request, _SENT):
        setattr(request, _SENT, itertools.count())


def before_send(manager: Any, tokenized_obj: Any) -> None:
    """Before ``_send_one_request``."""
    state = manager.rid_to_state.get(tokenized_obj.rid)
    sent: Iterator[int] | None = getattr(getattr(state, "obj", None), _SENT, None)
    if sent is not None:
        tokenized_obj.bootstrap_room = handover_of(tokenized_obj.bootstrap_room, next(sent))


PATCH = hook_patch(
    "samples",
    "each sample of a prompt has a hand-over of its own",
    Hook(f"{_REQUEST}.__getitem__", "after", after_getitem),
    Hook(f"{_MANAGER}._send_one_request", "before", before_send),
)
