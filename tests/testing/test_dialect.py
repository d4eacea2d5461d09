"""Stand-ins speak as a recorded server does; test_router_api.py holds the recording to a server that runs."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.stages import StageTimes
from tests.support.servers.dialect import EXCHANGES, differences, record, shape_of
from tests.support.servers.workers import running_worker

RECORDING: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "router" / "dialect.json").read_text("utf-8")
)


def test_everything_is_recorded() -> None:
    assert list(RECORDING) == [exchange.name for exchange in EXCHANGES]


async def test_a_stand_in_says_what_a_server_says() -> None:
    async with running_worker() as worker:
        worker.end_details = StageTimes().details()
        found = await asyncio.to_thread(record, worker.url)
    assert [line for name in RECORDING for line in differences(RECORDING[name], found[name], name)] == []


@pytest.mark.parametrize(
    ("name", "damage", "seen"),
    [
        ("chat, stream", lambda events: events.pop(0), "3 different ones, and a server has 4"),
        ("chat, stream", lambda events: events.pop(-2), "3 different ones, and a server has 4"),
        (
            "chat, stream",
            lambda events: events[0]["data"]["choices"][0]["delta"].pop("role"),
            "role: lacks '= assistant'",
        ),
        (
            "chat, stream",
            lambda events: events[2]["data"]["choices"][0].update(finish_reason="= stop"),
            "a server says '= length'",
        ),
        ("completion, stream", lambda events: events[0]["data"].update(more="string"), "no server says it"),
        ("messages, stream", lambda events: events[1].update(event=None), "content_block_start"),
    ],
)
def test_a_damaged_stream_differs_from_a_servers(name: str, damage: Any, seen: str) -> None:
    """The twin."""
    found = copy.deepcopy(RECORDING[name])
    assert differences(RECORDING[name], found) == []
    damage(found["events"])
    assert any(seen in line for line in differences(RECORDING[name], found))


def test_a_shape_has_kinds_and_what_readers_decide_by() -> None:
    assert shape_of({"b": [1, 2.5, "x"], "a": None, "role": "user", "finish_reason": None, "ok": True}) == {
        "a": "null",
        "b": ["number", "string"],
        "finish_reason": "= None",
        "ok": "boolean",
        "role": "= user",
    }
    assert shape_of({"deep": {"x": 1}, "list": [1]}, depth=1) == {"deep": "object", "list": "array"}
