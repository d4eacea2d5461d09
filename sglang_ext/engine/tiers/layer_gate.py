"""Where attention waits for KV that is being loaded: SGLang's layer transfer counter, over a mover."""

from __future__ import annotations

from sglang_ext.engine.tiers.mover import Mover

NOTHING_TO_WAIT_FOR = -1


class LayerGate:
    """Registered with the KV pool, which calls ``wait_until`` before it hands out a layer's buffers.

    SGLang carries a batch's ``hicache_consumer_index`` to the forward pass and calls ``set_consumer`` with
    it: here, the ticket of the newest load that this batch may depend on. The forward pass of layer i then
    waits for layer i of the loads up to that ticket, and for no later load.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._ticket = NOTHING_TO_WAIT_FOR

    def set_consumer(self, ticket: int) -> None:
        self._ticket = ticket

    def wait_until(self, layer: int) -> None:
        """Return when local ``layer`` may be read."""
        if self._ticket != NOTHING_TO_WAIT_FOR:
            self._mover.wait_layer(self._ticket, layer)

    def reset(self) -> None:
        self._ticket = NOTHING_TO_WAIT_FOR
