"""A scheduler keeps a bounded number of bytes of requests: long strings in each field, and new names.

The server is asked directly, as its router would ask it; `tests/security/test_sweep.py` asks a router.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from router_rig import SPECS

from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

MIB = 1 << 20
SAMPLING = {"temperature": 0, "max_new_tokens": 1}
PROMPT = [5, 6, 7, 8] * 8
NAMES = ("rid", "extra_key", "cache_salt")
"""Fields by which a scheduler keeps something."""
NAME_CHARACTERS = 512
"""Of a name that a router lets through."""
GROWTH = 96 * MIB
"""Of a scheduler, by its allocator and what SGLang caches. A table of all strings below would be larger."""


@pytest.fixture
def server(get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    return get_server(SPECS[0])


def string_fields() -> Iterator[str]:
    """The fields of SGLang's request that can be strings, by its source: importing it takes seconds."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = Path(package, "srt", "managers", "io_struct.py").read_text(encoding="utf-8")
    for each in ast.parse(source).body:
        if isinstance(each, ast.ClassDef) and each.name in ("BaseReq", "GenerateReqInput"):
            for field in each.body:
                if isinstance(field, ast.AnnAssign) and "str" in ast.unparse(field.annotation):
                    yield ast.unparse(field.target)


def resident(server: ServerProcess) -> int:
    (scheduler,) = server.processes("sglang::scheduler")
    return int(psutil.Process(scheduler).memory_info().rss)


def send(client: httpx.Client, body: dict[str, object]) -> int:
    return client.post(
        "/generate", json={"input_ids": PROMPT, "sampling_params": SAMPLING, **body}
    ).status_code


def test_no_string_of_a_request_is_kept_by_a_scheduler(
    server: ServerProcess, long_run: bool, record_property: Callable[[str, object], None]
) -> None:
    """Values of 1 MB, each sent several times with another beginning."""
    times = 40 if long_run else 8
    fields = [field for field in string_fields() if field not in ("text", "input_ids")]
    assert {"rid", "extra_key", "bootstrap_host"} <= set(fields)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert send(client, {}) == 200
        before = resident(server)
        for field in fields:
            for number in range(times):
                assert send(client, {field: f"{number}" + "x" * MIB}) < 600
        assert send(client, {}) == 200
    grown = resident(server) - before
    record_property("grown_bytes", grown)
    assert grown < GROWTH < len(fields) * times * MIB


def test_names_without_end_are_bounded_in_a_scheduler(
    server: ServerProcess, long_run: bool, record_property: Callable[[str, object], None]
) -> None:
    """Each prompt has a namespace of its own, which goes with its KV."""
    count = 10_000 if long_run else 100
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert send(client, {}) == 200
        before = resident(server)
        for number in range(count):
            name = f"{number:06d}".ljust(NAME_CHARACTERS, "n")
            assert send(client, dict.fromkeys(NAMES, name)) == 200
    grown = resident(server) - before
    record_property("grown_bytes", grown)
    assert grown < GROWTH
