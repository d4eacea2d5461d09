"""The stages of one of SGLang's requests, from its time stats and from the stages sent with its KV.

Measurements are attributes of the request: `Handed` since its KV has come from another
instance, the stages that it had where it ran before it moved, and when it ended if its answer came later.
"""

from __future__ import annotations

import time
from typing import Any, Final

from sglang_ext.engine.metric_table import REQUESTS
from sglang_ext.engine.rank_metrics import made
from sglang_ext.protocol.metrics import Kind
from sglang_ext.stages import Handed, Moments, StageTimes, computed, received

_HANDED: Final = "sglang_ext_handed"
_FORMER: Final = "sglang_ext_former_stages"
_ENDED: Final = "sglang_ext_ended"


def set_handed(req: Any, handed: Handed) -> None:
    """A request's KV has come."""
    setattr(req, _HANDED, handed)


def set_former(req: Any, stages: StageTimes) -> None:
    """A request goes on here, after it took so long elsewhere."""
    setattr(req, _FORMER, stages)


def end_stages(req: Any) -> None:
    """A request has ended, and its answer is held back: no later time belongs to its stages."""
    setattr(req, _ENDED, time.perf_counter())


def own_stages(req: Any) -> tuple[str, StageTimes]:
    """(role of this instance, the request's stages measured here up to now)."""
    stats, now = req.time_stats, getattr(req, _ENDED, None) or time.perf_counter()
    at = Moments(stats.scheduler_recv_time, stats.forward_entry_time, stats.prefill_finished_time)
    if req.disagg_kv_sender is not None:
        return "prefill", computed(at, now, hands_over=True)
    handed: Handed | None = getattr(req, _HANDED, None)
    if handed is not None or req.bootstrap_room is not None:
        return "decode", received(at, now, handed)
    return "colocated", computed(at, now, hands_over=False)


def request_stages(req: Any) -> StageTimes:
    """All stages of a request up to now, also those at other instances."""
    _, stages = own_stages(req)
    handed: Handed | None = getattr(req, _HANDED, None)
    former: StageTimes | None = getattr(req, _FORMER, None)
    if handed is not None:
        stages = handed.before + stages
    return stages if former is None else former + stages


class StageMetrics:
    """Histograms of the stages of requests that have ended here, each instance's own."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry

        self._seconds = made(REQUESTS, REQUESTS.row("stage_seconds", Kind.HISTOGRAM), CollectorRegistry())

    def observe(self, req: Any) -> None:
        """A request has ended. Stages that it did not pass here are not counted."""
        role, stages = own_stages(req)
        for stage, seconds in stages.items():
            if seconds:
                self._seconds.labels(stage, role).observe(seconds)
