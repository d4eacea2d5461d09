"""What a request was expected to take until its first token, term by term, and what it took."""

from __future__ import annotations

from typing import Any

import msgspec


class Estimate(msgspec.Struct):
    """Of one request at the instance it is sent to, in seconds. For ``/explain`` and metrics."""

    queue_s: float
    """Until what was sent there before is computed."""
    load_s: float
    """Bringing what it holds below HBM there; 0 where computing that is expected to take less."""
    transfer_s: float
    """Bringing KV from another instance; with prefill and decode apart, the hand-over too."""
    exec_s: float
    """Computing the rest, together with what waits there."""
    correction: float
    """The factor in ``queue_s`` and ``exec_s``: observed over calculated, of the last answers."""
    observed_s: float | None = None
    """To the first token; not known of an answer that does not stream."""
    observed_queue_s: float | None = None
    """Of that, until what was sent there before had its first tokens."""

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.queue_s + self.load_s + self.transfer_s + self.exec_s

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {"ttft_s": self.ttft_s, **msgspec.structs.asdict(self)}
