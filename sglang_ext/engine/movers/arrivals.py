"""The thread that queues copies to a GPU for KV that is still arriving, each layer once it is there.

A forward pass on a GPU waits for events. Until a layer has arrived there is none, so the thread that launches
the pass waits for the layer's copy to be queued; the GPU meanwhile works on the layers before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from sglang_ext.engine.movers.mover import MoverError, Source

POLL_SECONDS = 0.0005
"""Between two looks at sources of which none has its next layer."""


class Arriving(Protocol):
    """A load whose layers arrive one after the other."""

    source: Source
    events: list[Any]
    """One for each layer that has been queued."""


class Arrivals:
    """See the module's docstring. The thread runs from the first load on.

    Args:
        queue: queues the next layer of a load, and adds its event. Called by the thread.
        n_layers: after which a load is complete.
    """

    def __init__(self, queue: Callable[[Any], None], n_layers: int) -> None:
        self._queue, self._n_layers = queue, n_layers
        self._loads: list[Any] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, load: Arriving) -> None:
        """Queue its layers as they arrive. Raises MoverError after a failure."""
        with self._changed:
            self.check()
            self._loads.append(load)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
                self._thread.start()

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when something about queued layers holds. Raises MoverError when it cannot any more."""
        if condition():
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or condition())
            self.check()

    def check(self) -> None:
        """Raises MoverError when a layer could not be queued."""
        if self._failure is not None:
            raise MoverError("KV that arrived could not be copied to the GPU") from self._failure

    def look(self) -> bool:
        """Queue the layers that have arrived; returns whether there were any. In the thread."""
        found = False
        for load in list(self._loads):
            while len(load.events) < self._n_layers and load.source.decided(len(load.events)):
                self._queue(load)
                found = True
                with self._changed:
                    self._changed.notify_all()
            if len(load.events) == self._n_layers:
                with self._changed:
                    self._loads.remove(load)
        return found

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._loads or self._closing)
                    if self._closing:
                        return
                if not self.look():
                    with self._changed:
                        self._changed.wait(POLL_SECONDS)
        except BaseException as error:  # noqa: BLE001 - waiting threads raise it as a MoverError
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
