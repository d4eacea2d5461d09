"""How long a request spent in each stage: in its answer, and in the server's metrics.

Change: once a request has ended, ``meta_info["cached_tokens_details"]`` has its stages (``stage_prefill_us``
and so on, see `sglang_ext.stages`), also in the ``sglext`` of OpenAI answers, whose models have fixed fields.
Before decode's ``_commit_transfer_to_req``, the stages that came with the KV are kept.
``SGLANG_EXT_KV_STAGE_TIMES=off`` leaves answers as they are; metrics are always kept.

Why no extension point serves: SGLang's own time stats reach an answer as times of day, of the last instance
only, and only with ``--enable-metrics``.

Can go: when SGLang reports stages of all instances.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from sglang_ext.engine.tiers.acked_answers import DETAIL_PREFIX as DURABILITY_PREFIX
from sglang_ext.patches.adapter.admission import BACKEND
from sglang_ext.patches.base import Patch, resolve
from sglang_ext.patches.hooks import flags
from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch
from sglang_ext.patches.process import PROCESS
from sglang_ext.stages import DETAIL_PREFIX, StageTimes

logger = logging.getLogger(__name__)

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_OPENAI = "sglang.srt.entrypoints.openai"
_DETAILS = f"{_OPENAI}.protocol.CachedTokensDetails"
_HOLDERS = (
    "SglExt",
    "CompletionResponse",
    "CompletionStreamResponse",
    "ChatCompletionResponse",
    "ChatCompletionStreamResponse",
)
"""Models that contain the details, and have to be built anew."""


class StageReporter:
    """Collects and reports stages in this scheduler process. The first rank counts; all ranks' stages are
    alike."""

    def __init__(self, server_args: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        from sglang_ext.patches.adapter.request_stages import StageMetrics

        self.args = server_args
        self.reports = flags.carried_config(server_args, os.environ).stage_times == "on"
        parallel = get_parallel()
        counts = server_args.enable_metrics and parallel.attn_tp_rank == parallel.attn_cp_rank == 0
        self.metrics = StageMetrics() if counts else None

    def ended(self, req: Any) -> StageTimes | None:
        """Count a request that has ended; its stages, if its answer is to report them."""
        from sglang_ext.patches.adapter.request_stages import request_stages

        if self.metrics is not None:
            self.metrics.observe(req)
        return request_stages(req) if self.reports else None


def after_details(details: dict[str, int | str] | None, streamer: Any, req: Any) -> Any:
    """After ``get_cached_tokens_details``."""
    args = streamer.server_args
    if not req.finished() or not (called_cache(streamer) is not None or _hands_over(args)):
        return None
    try:
        reporter = PROCESS.stages
        if reporter is None or reporter.args is not args:
            reporter = PROCESS.stages = StageReporter(args)
        stages = reporter.ended(req)
    except Exception:
        logger.exception("the stages of a request are not known")
        return None
    return None if stages is None else {**(details or {"device": 0, "host": 0}), **stages.details()}


def _hands_over(server_args: Any) -> bool:
    ours = server_args.disaggregation_transfer_backend == BACKEND
    return bool(ours and server_args.disaggregation_mode != "null")


def before_commit(_queue: Any, decode_req: Any) -> None:
    """Before decode's ``_commit_transfer_to_req``, which lets the receiver go."""
    from sglang_ext.patches.adapter.request_stages import set_handed

    if (handed := getattr(decode_req.kv_receiver, "handed", None)) is not None:
        set_handed(decode_req.req, handed)


def after_model(result: Any, details: Mapping[str, Any]) -> None:
    """After ``cached_tokens_details_from_dict``, which knows SGLang's own entries only."""
    for name, value in details.items():
        if name.startswith((DETAIL_PREFIX, DURABILITY_PREFIX)):
            setattr(result, name, value)


_HOOKS = hook_patch(
    "stages",
    "an answer tells how long its request spent in each stage",
    Hook(f"{_STREAMER}.get_cached_tokens_details", "after", after_details),
    Hook(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        "before",
        before_commit,
    ),
    Hook(f"{_OPENAI}.utils.cached_tokens_details_from_dict", "after", after_model),
    Hook(f"{_OPENAI}.serving_chat.cached_tokens_details_from_dict", "after", after_model),
    Hook(f"{_OPENAI}.serving_completions.cached_tokens_details_from_dict", "after", after_model),
)


def open_models() -> None:
    """Let the models of OpenAI's answers have more entries."""
    details = resolve(_DETAILS)
    if details.model_config.get("extra") != "allow":
        details.model_config["extra"] = "allow"
        details.model_rebuild(force=True)
        for holder in _HOLDERS:
            resolve(f"{_OPENAI}.protocol.{holder}").model_rebuild(force=True)


def apply() -> None:
    """The models now, the hooks when SGLang applies them."""
    open_models()
    _HOOKS.apply()


def applied() -> bool:
    """Whether all of it is in place."""
    return resolve(_DETAILS).model_config.get("extra") == "allow" and _HOOKS.applied()


PATCH = Patch(_HOOKS.name, _HOOKS.summary, _HOOKS.scope, _HOOKS.targets, apply, applied)
