"""Hold the end of an answer back until its KV is durable (``--kv-durability acked``).

Change: SGLang keeps a finished request's KV before it streams its end. Four hooks:

- around ``stream_output``: of requests that have finished, only requests whose end may be sent go on to the
  detokenizer (`engine/tiers/acked_answers.py`). Tokens before the last chunk have gone on already, as always;
- after ``ingest_requests``, in each pass: requests that have become durable, or have waited too long, go on;
- after ``get_cached_tokens_details``: the answer says which of the two;
- after ``init_running_status``: the cache reports the requests whose KV is in the tree.

Aborted answers, and requests that a prefill server hands over, are never held back: their ends promise
nothing.

Why no extension point serves: nothing stands between a request's end and its answer.

Can go: when SGLang can wait for a cache before it ends an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from sglang_ext.engine.cache.listeners import Listener
from sglang_ext.engine.tiers.acked_answers import Acked, AckedAnswers
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch
from sglang_ext.patches.process import PROCESS

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_ACKED: Final = "sglang_ext_acked"
"""Attribute of a request: the state of its durability."""


class HeldEnds(Listener):
    """The finished requests whose end was not sent yet."""

    def __init__(self, cache: Any, answers: AckedAnswers) -> None:
        self._cache = cache
        self._answers = answers
        self._held: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"HeldEnds({len(self._held)})"

    def request_ended(self, req: Any, tokens: Any) -> None:
        if _promises(req):
            namespace = self._cache.namespace(req.extra_key, req.cache_salt)
            setattr(req, _ACKED, self._answers.ended(namespace, encode_tokens(tokens)))

    def passing(self, reqs: Sequence[Any]) -> list[Any]:
        """The requests whose output may be sent now; the others are kept until then."""
        return [req for req in reqs if self._passes(req)]

    def _passes(self, req: Any) -> bool:
        if not _promises(req) or req.finished_output:
            return True
        acked: Acked | None = getattr(req, _ACKED, None)
        if acked is None:
            acked = self._answers.uncached()
            setattr(req, _ACKED, acked)
        if self._answers.may_report(acked):
            self._held.pop(req.rid, None)
            return True
        if req.rid not in self._held:
            from sglang_ext.patches.adapter.request_stages import end_stages

            end_stages(req)
            self._held[req.rid] = req
        return False

    def due(self) -> list[Any]:
        """The kept requests whose end may be sent by now."""
        return self.passing(list(self._held.values())) if self._held else []


def _promises(req: Any) -> bool:
    """Whether the end of a request says that there is an answer, which this instance has."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not req.finished() or isinstance(req.finished_reason, FINISH_ABORT):
        return False
    return req.disagg_kv_sender is None


def _held_ends(part: Any) -> HeldEnds | None:
    """Of the cache of a scheduler or of a part of one; None where no end waits."""
    return None if called_cache(part) is None else PROCESS.held_ends


def after_running_status(_result: None, scheduler: Any) -> None:
    """After ``init_running_status``."""
    cache: Any = called_cache(scheduler)
    answers = None if cache is None else cache.find(AckedAnswers)
    if answers is not None:
        PROCESS.held_ends = HeldEnds(cache, answers)
        cache.listeners.add(PROCESS.held_ends)


def around_stream(
    stock: Callable[..., None], streamer: Any, reqs: Sequence[Any], return_logprob: bool, skip_req: Any = None
) -> None:
    """Around ``stream_output``."""
    held = _held_ends(streamer) if streamer.is_generation else None
    stock(streamer, reqs if held is None else held.passing(reqs), return_logprob, skip_req)


def after_ingest(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``ingest_requests``."""
    held = _held_ends(scheduler)
    due = [] if held is None else held.due()
    if due:
        scheduler.output_streamer.stream_output(due, any(req.return_logprob for req in due))


def after_details(details: dict[str, int | str] | None, streamer: Any, req: Any) -> Any:
    """After ``get_cached_tokens_details``."""
    acked: Acked | None = getattr(req, _ACKED, None)
    if acked is None or acked.reported is None:
        return None
    return {**(details or {"device": 0, "host": 0}), **acked.details()}


PATCH = hook_patch(
    "durable_ends",
    "the end of an answer waits until its KV is on disk",
    Hook(f"{_SCHEDULER}.init_running_status", "after", after_running_status),
    Hook(f"{_SCHEDULER}.ingest_requests", "after", after_ingest),
    Hook(f"{_STREAMER}.stream_output", "around", around_stream),
    Hook(f"{_STREAMER}.get_cached_tokens_details", "after", after_details),
)
