"""Run the functions that SGLang would compile at the first request that needs them as they are written.

Change: around two functions of the sampler that ``torch.compile`` wraps. SGLang's warm-up does not call them.
The first request with a repetition penalty, or with a seed, compiled while all others waited (14 s on a CPU),
and ended the server where there is no C++ compiler. Each is a few operators over the logits. On a CPU nothing
is compiled at all (``cpu/runtime.py``).

Why no extension point serves: SGLang has no flag for it.

Can go: when SGLang calls them in its warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.plugin_hooks import Hook, hook_patch

_PENALTY = "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties"


def around_compiled(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around a function that ``torch.compile`` has wrapped: call the wrapped function."""
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)(*args, **kwargs)


PATCH = hook_patch(
    "uncompiled",
    "penalties and seeded sampling do not compile at the first request",
    # SGLang puts a hooked function in the place of the original in every module that has imported it.
    Hook(_PENALTY, "around", around_compiled),
    Hook("sglang.srt.layers.sampler.multinomial_with_seed", "around", around_compiled),
)
