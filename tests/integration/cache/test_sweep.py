"""A scheduler keeps a bounded number of bytes of requests: long strings in each field, and new names.

The server has all tiers, each so small that names fill them. It is asked directly, as its router would ask
it; `tests/security/test_sweep.py` asks a router.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hooked_server import FOLDER

from sglang_ext.testing.waiting import wait_until
from tests.support.leaks import LeakGuard
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(7200)]

MIB = 1 << 20
SAMPLING = {"temperature": 0, "max_new_tokens": 1}
PROMPT = [5, 6, 7, 8] * 12
"""Three blocks."""
NAMES = ("rid", "extra_key", "cache_salt")
"""Fields by which a scheduler keeps something."""
NAME_CHARACTERS = 512
"""Length of a name that a router lets through."""
FILLS = 45
"""The number of names that fill all tiers, which have 128 blocks together."""
NAMES_SENT, MOST_MORE = 60, 45
"""A table that keeps each name grows by more. Tiers that make room grow and shrink by some blocks."""
GROWTH = 96 * MIB
"""Growth of a scheduler by allocator and SGLang's caches. A table of all strings below would be larger."""
MESSAGES = [{"role": "user", "content": "x"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 1, "temperature": 0}
FUNCTION = {"name": "f", "description": "x", "parameters": {"type": "object"}}


def deep(value: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, body): a string in fields of fields."""
    schema = {"name": "s", "schema": {"type": "object", "description": value}}
    format = {"type": "json_schema", "json_schema": schema}
    yield "/v1/chat/completions", {**CHAT, "response_format": format}
    for name in ("regex", "ebnf", "structural_tag", "json_schema"):
        yield "/generate", {"input_ids": PROMPT, "sampling_params": {**SAMPLING, name: value}}
    for params in ({"stop": value}, {"stop_regex": value}, {"custom_params": {"x": value}}, {value: 1}):
        yield "/generate", {"input_ids": PROMPT, "sampling_params": {**SAMPLING, **params}}
    yield "/generate", request({"session_params": {"id": value}})
    for message in (
        {"role": "user", "content": value},
        {"role": "user", "content": [{"type": "text", "text": value}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": value}}]},
        {"role": value, "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": value},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]},
    ):
        yield "/v1/chat/completions", {**CHAT, "messages": [message]}
    for name in ("name", "description"):
        tool = {"type": "function", "function": {**FUNCTION, name: value}}
        yield "/v1/chat/completions", {**CHAT, "tools": [tool]}
    yield "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"x": value}}
    yield "/v1/chat/completions", {**CHAT, "logit_bias": {value: 1}}
    yield "/v1/chat/completions", {**CHAT, value: 1}
    yield "/open_session", {"capacity_of_str_len": 1, "session_id": value}


def string_fields() -> Iterator[str]:
    """The fields of SGLang's request that can be strings, by its source: importing it takes seconds."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = Path(package, "srt", "managers", "io_struct.py").read_text(encoding="utf-8")
    for each in ast.parse(source).body:
        if isinstance(each, ast.ClassDef) and each.name in ("BaseReq", "GenerateReqInput"):
            for field in each.body:
                if isinstance(field, ast.AnnAssign) and "str" in ast.unparse(field.annotation):
                    yield ast.unparse(field.target)


@dataclass
class Counted:
    """A server whose scheduler counts the entries of its tables.

    folder: where it is asked to.
    """

    server: ServerProcess
    folder: Path
    numbers: Iterator[int]
    """Numbers of names, each used once."""

    @property
    def resident(self) -> int:
        """Bytes of its scheduler."""
        (scheduler,) = self.server.processes("sglang::scheduler")
        return int(psutil.Process(scheduler).memory_info().rss)

    def sizes(self) -> dict[str, int]:
        """Entries of each table, and objects of each class, when nothing is under way. The first count takes
        the scheduler some 90 MB.
        """
        self.server.wait_idle()
        answer = self.folder / "tables.sizes"
        (self.folder / "tables.ask").touch()
        wait_until(answer.exists, seconds=120, what="the sizes of the scheduler's tables")
        found: dict[str, int] = json.loads(answer.read_text())
        answer.unlink()
        return found

    def send_names(self, client: httpx.Client, times: int) -> None:
        """Each prompt has a namespace of its own, which goes with its KV."""
        for _ in range(times):
            name = f"{next(self.numbers):06d}".ljust(NAME_CHARACTERS, "n")
            assert send(client, "/generate", request(dict.fromkeys(NAMES, name))) == 200

    def grown(self, client: httpx.Client, times: int) -> dict[str, int]:
        """Tables that grow with the names that come, and by how much."""
        before = self.sizes()
        self.send_names(client, times)
        return more_than(MOST_MORE, before, self.sizes())


def more_than(most: int, before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Tables that have grown by more entries than that, and by how many."""
    return {place: more for place, size in after.items() if (more := size - before.get(place, 0)) > most}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard) -> Iterator[Counted]:
    folder, disk = tmp_path_factory.mktemp("counted"), tmp_path_factory.mktemp("kv")
    spec = ServerSpec(
        flags=(
            *("--radix-cache-backend", "global", "--max-total-tokens", "512", "--kv-dram-size", "2MB"),
            *("--kv-disk-path", str(disk), "--kv-disk-size", "4MB"),
        ),
        environment={FOLDER: str(folder)},
        run=(str(Path(__file__).parents[1].joinpath("servers", "counted_server.py")),),
    )
    with leak_guard.adopting():
        server = ServerProcess(spec)
        server.start()
    yield Counted(server, folder, count())
    server.stop()


@pytest.fixture
def client(counted: Counted) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=counted.server.url, timeout=120) as found:
        yield found


def request(more: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": SAMPLING, **more}


def send(client: httpx.Client, path: str, body: dict[str, Any]) -> int:
    return client.post(path, json=body).status_code


def test_names_without_end_are_bounded_in_a_scheduler(
    counted: Counted, client: httpx.Client, long_run: bool, record_property: Callable[[str, object], None]
) -> None:
    """When all tiers are full, no table grows with names any more."""
    counted.send_names(client, FILLS)
    counted.sizes()
    before = counted.resident
    grown = counted.grown(client, 10_000 if long_run else NAMES_SENT)
    record_property("grown_bytes", counted.resident - before)
    assert grown == {}
    assert counted.resident - before < GROWTH


def test_a_table_that_keeps_names_is_seen(counted: Counted, client: httpx.Client) -> None:
    """The twin of the test above."""
    (counted.folder / "leak").touch()
    try:
        grown = counted.grown(client, NAMES_SENT)
    finally:
        (counted.folder / "leak").unlink()
    assert [place.rpartition(".")[2] for place in grown] == ["_leaked"], grown


def test_no_string_of_a_request_is_kept_by_a_scheduler(
    counted: Counted, client: httpx.Client, long_run: bool, record_property: Callable[[str, object], None]
) -> None:
    """Values of 1 MB, each sent several times with another beginning."""
    times = 40 if long_run else 8
    fields = [field for field in string_fields() if field not in ("text", "input_ids")]
    assert {"rid", "extra_key", "bootstrap_host"} <= set(fields)
    assert send(client, "/generate", request({})) == 200
    tables = counted.sizes()
    before = counted.resident
    for number in range(times):
        value = f"{number}" + "x" * MIB
        for field in fields:
            assert send(client, "/generate", request({field: value})) < 600
        if long_run or not number:
            for path, body in deep(value if long_run else value[: MIB // 32]):
                assert send(client, path, body) < 600
    assert send(client, "/generate", request({})) == 200
    grown = counted.resident - before
    record_property("grown_bytes", grown)
    assert more_than(MOST_MORE, tables, counted.sizes()) == {}
    assert grown < GROWTH < len(fields) * times * MIB
