"""Output of ``sglang-ext cluster``: a live table on a terminal that rich can redraw, else lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sglang_ext.cluster.lifecycle import State
from sglang_ext.cluster.process import tail
from sglang_ext.cluster.supervisor import PartStatus

STYLES: Mapping[State, str] = {
    State.WAITING: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.STOPPING: "yellow",
    State.ENDED: "dim",
    State.FAILED: "bold red",
}
BUSY = frozenset({State.WAITING, State.STARTING, State.STOPPING})


class Display:
    """Shows the parts of a cluster as its observer; ``with`` puts the terminal right at the end.

    Args:
        console: where to; whether it is a terminal that can be redrawn decides the form.
        log_dir: named once everything is ready.
        announce: print the address for requests once everything is ready.
    """

    def __init__(self, console: Console, log_dir: Path, *, announce: bool = True) -> None:
        self._console = console
        self._log_dir = log_dir
        self._parts: dict[str, PartStatus] = {}
        # rich draws nothing anew on a terminal that cannot move its cursor (TERM=dumb).
        self._redraws = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=True)
        self._announce_ready = announce
        self._announced = False
        self._started = time.monotonic()

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, parts: Mapping[str, PartStatus]) -> None:
        """See ``supervisor.Observer``."""
        self._parts = dict(parts)
        self._started = time.monotonic()

    def changed(self, status: PartStatus) -> None:
        """See ``supervisor.Observer``."""
        if self._redraws:
            busy = any(other.state in BUSY for other in self._parts.values())
            if busy and not self._live.is_started:
                self._live.start(refresh=True)
            elif not busy and self._live.is_started:
                self._live.stop()
        else:
            self._print(self._line(status))
        if self._announce_ready and all(other.state is State.READY for other in self._parts.values()):
            self._announce()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _line(self, status: PartStatus) -> str:
        name, state = status.part.name, status.state
        if state is State.STARTING:
            again = f" again (restart {status.restarts})" if status.restarts else ""
            return escape(f"{name}: starting{again}, log {status.log}")
        if state is State.READY and status.ready_after_s is not None:
            return escape(f"{name}: ready after {status.ready_after_s:.0f} s, {status.url}")
        return escape(f"{name}: {state.value}")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("part", "state", "time", "address", "last line of its log"):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        for name, status in self._parts.items():
            style = STYLES[status.state]
            took = status.ready_after_s
            if took is None and status.started_at:
                took = time.monotonic() - status.started_at
            last = tail(status.log)[-1] if status.state in (State.STARTING, State.STOPPING) else ""
            table.add_row(
                name,
                f"[{style}]{status.state.value}[/]",
                "" if took is None else f"{took:.0f} s",
                status.url,
                f"[dim]{escape(last)}[/]",
            )
        return table

    def _announce(self) -> None:
        """The addresses, once everything is ready; after a restart a line is enough."""
        if self._announced:
            self._print("the cluster is complete again")
            return
        self._announced = True
        parts = list(self._parts.values())
        last = parts[-1]
        self._print(f"The cluster is ready after {time.monotonic() - self._started:.0f} s.")
        self._print(escape(f"  {'router':10} {last.part.url or last.url}  send requests here"))
        for status in reversed(parts if last.part.own_url else parts[:-1]):
            self._print(escape(f"  {status.part.name:10} {status.url}"))
        self._print(escape(f"  {'logs':10} {self._log_dir}"))
        self._print("Ctrl-C ends it.")
