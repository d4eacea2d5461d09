"""The terminal's output while a cluster starts and ends."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sglang_ext.cluster.lifecycle import State
from sglang_ext.cluster.plan import Part
from sglang_ext.cluster.supervisor import PartStatus
from sglang_ext.cluster.terminal import Display


def statuses(folder: Path) -> dict[str, PartStatus]:
    return {
        name: PartStatus(Part(name, ("true",), {}, f"http://127.0.0.1:{port}"), folder / f"{name}.log")
        for port, name in enumerate(("server-0", "router"), start=30_000)
    }


def play(console: Console, folder: Path) -> None:
    parts = statuses(folder)
    with Display(console, folder) as display:
        display.begin(parts)
        for status in parts.values():
            status.state, status.started_at = State.STARTING, 1.0
            status.log.write_text("loading [weights] of the model\n")
            display.changed(status)
            status.state, status.ready_after_s = State.READY, 2.0
            display.changed(status)
        parts["server-0"].state = State.FAILED
        display.changed(parts["server-0"])


@pytest.mark.parametrize("dumb", [False, True])
def test_plain_lines_where_there_is_no_terminal_to_redraw(tmp_path: Path, dumb: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=60)
    if dumb:
        console = Console(file=out, width=120, force_terminal=True, _environ={"TERM": "dumb"}, no_color=True)
    play(console, tmp_path)
    lines = out.getvalue().splitlines()
    assert lines[0] == f"server-0: starting, log {tmp_path / 'server-0.log'}"
    assert lines[1] == "server-0: ready after 2 s, http://127.0.0.1:30000"
    assert any("The cluster is ready" in line for line in lines)
    assert any("http://127.0.0.1:30001  send requests here" in line for line in lines)
    assert lines[-1] == "server-0: failed"
    assert "\x1b" not in out.getvalue()


def test_a_live_table_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    play(Console(file=out, width=120, force_terminal=True, _environ={}), tmp_path)
    text = out.getvalue()
    assert "starting" in text
    assert "[weights]" in text
    assert "send requests here" in text
