"""Requests of our own in SGLang's scheduler, made for their KV: each generates one token, which is dropped.

The rest of an announced prompt is computed by them, and the beginning of a prompt that a peer goes on with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from sglang_ext.patches.adapter.pd.pd_setup import around_layers

logger = logging.getLogger(__name__)

PIECE_TOKENS: Final = 1024
"""Computed at a time, or a prefill chunk, where that is less."""


class Running(Protocol):
    """A request of ours in the scheduler (SGLang's ``Req``)."""

    def finished(self) -> bool: ...


class SglangHost:
    """SGLang's scheduler. Our requests are named like its health checks, whose answers are dropped, too."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._scheduler: Any = None

    def meet(self, scheduler: Any) -> None:
        """It is there, which SGLang makes after its cache."""
        self._scheduler = scheduler

    def idle(self) -> bool:
        scheduler = self._scheduler
        return (
            scheduler is not None
            and scheduler.is_fully_idle()
            and not getattr(scheduler, "_engine_paused", False)
        )

    @property
    def piece_tokens(self) -> int:
        chunk = self._scheduler.chunked_prefill_size
        return min(PIECE_TOKENS, chunk) if chunk is not None and chunk > 0 else PIECE_TOKENS

    def watch(self, written: Callable[[int], None]) -> int:
        kvcache = self._allocator.get_kvcache()
        around_layers(kvcache, after=lambda layer: written(layer - kvcache.start_layer))
        return int(kvcache.layer_num)

    def start(
        self, name: str, tokens: list[int], extra_key: str | None, cache_salt: str | None
    ) -> Running | None:
        from array import array

        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        scheduler = self._scheduler
        if not scheduler.is_generation:
            return None  # one to generate would end it
        if max(tokens) >= scheduler.model_config.vocab_size or min(tokens) < 0:
            logger.warning("a router asks for token ids that the model has not; they are not computed")
            return None
        parameters = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        parameters.normalize(None)
        rid = f"{HEALTH_CHECK_RID_PREFIX}_{name}"
        scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", tokens),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=parameters,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                extra_key=extra_key,
                cache_salt=cache_salt,
                no_logs=True,
            )
        )
        queue = scheduler.waiting_queue
        return queue[-1] if queue and queue[-1].rid == rid else None
