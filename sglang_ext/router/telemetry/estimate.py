"""Expected and observed time of a request until its first token, term by term."""

from __future__ import annotations

from typing import Any

import msgspec


class Estimate(msgspec.Struct):
    """Estimate for one request at its target instance, in seconds. For ``/explain`` and metrics."""

    queue_s: float
    """Until the instance has computed the prompts that were sent before."""
    load_s: float
    """Loading the instance's own KV from below HBM; 0 if computing is expected to be faster."""
    transfer_s: float
    """Transferring KV from another instance; with PD disaggregation, including the hand-over."""
    exec_s: float
    """Computing the rest, batched with the prompts in the instance's queue."""
    correction: float
    """The factor in ``queue_s`` and ``exec_s``: observed over calculated seconds of recent answers."""
    basis: str = ""
    """The origin of the costs: ``calibrated``, ``estimated`` from the model's shapes, or ``defaults``."""
    observed_s: float | None = None
    """Time to first token; None for answers that do not stream."""
    observed_queue_s: float | None = None
    """Part of ``observed_s`` until the requests sent before had their first tokens."""

    @property
    def ttft_s(self) -> float:
        """Expected time to first token."""
        return self.queue_s + self.load_s + self.transfer_s + self.exec_s

    def as_json(self) -> dict[str, Any]:
        """The estimate in seconds, as ``/explain`` shows it."""
        return {"ttft_s": self.ttft_s, **msgspec.structs.asdict(self)}
