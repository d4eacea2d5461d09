"""`sglang-ext cluster --prefill 1 --decode 1`: the router sends pairs; conversations find their earlier
turns. With `--decode 2` a server changes its role and back.

In the short form test_demo starts such a cluster, and test_router_pairs has a router send pairs.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from listening import AGENT, BOOTSTRAP, GLOO, HTTP, ROUTER, STORE, TRANSFER, beyond_loopback, rows
from pd_fleet import prompt_of
from test_cluster import START_S, RunningCluster, ask

from tests.support.servers.server import ports_and_contexts

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(2 * START_S)]

TURNS = 4
ANSWER_TOKENS = 30
ADDED_TOKENS = 60
BLOCK = 16


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    found = RunningCluster(tmp_path, "--prefill", "1", "--decode", "1")
    yield found
    found.close()


def test_a_conversation_through_the_router_reuses_prompts_and_answers(cluster: RunningCluster) -> None:
    url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
    history: list[int] = []
    cached: list[int] = []
    for number in range(TURNS):
        before = len(history)
        history += prompt_of(number, ADDED_TOKENS)
        found: dict[str, Any] = ask(
            url,
            {
                "input_ids": history,
                "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
            },
        )
        assert len(found["output_ids"]) == ANSWER_TOKENS
        cached.append(found["meta_info"]["cached_tokens"])
        # All whole blocks, without the answer's last token, whose KV is not computed.
        assert cached[-1] >= before - 2 * BLOCK, (cached, before)
        history += found["output_ids"]
    assert cached == sorted(cached)
    # With all that moves KV in use: routers ask one port, other servers another, and bytes come by a third.
    # SGLang, the agent and the endpoint have a ZeroMQ context each.
    schedulers = [each.pid for each in cluster.below() if "sglang::scheduler" in "".join(each.cmdline())]
    assert [ports_and_contexts(pid) for pid in schedulers] == [(3, 3), (3, 3)]
    assert cluster.process.poll() is None
    listens_as_listed(cluster, servers=2)


def listens_as_listed(cluster: RunningCluster, servers: int) -> None:
    """The sockets of all its processes are in the list in docs/security.md, and on loopback alone."""
    pids = [each.pid for each in cluster.below()]
    assert beyond_loopback(pids) == []
    found = rows(pids)
    assert found.pop(GLOO) > 0
    each = Counter({HTTP: 1, BOOTSTRAP: 1, AGENT: 1, TRANSFER: 2, STORE: 1})
    assert found == Counter({ROUTER: 1, **{row: servers * count for row, count in each.items()}})


def test_its_servers_change_their_roles_without_further_flags(tmp_path: Path) -> None:
    cluster = RunningCluster(
        tmp_path, "--prefill", "1", "--decode", "2", "--router-args", "--role-controller dry-run"
    )
    try:
        url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
        sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        prompts = [prompt_of(number, 6 * BLOCK) for number in range(4)]
        bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
        expected = [ask(url, body)["output_ids"] for body in bodies]
        seen = _call(f"{url}/cluster")
        assert seen["roles"]["mode"] == "dry-run"
        decodes = [one["instance"] for one in seen["instances"] if one["role"] == "decode"]
        assert len(decodes) == 2
        for role in ("prefill", "decode"):
            changed = _call(f"{url}/cluster/instances/{decodes[0]}/role", {"role": role})
            assert (changed["role"], changed["state"]) == (role, "ready")
            again = [ask(url, body) for body in bodies]
            assert [answer["output_ids"] for answer in again] == expected
            assert all(answer["meta_info"]["cached_tokens"] >= 5 * BLOCK for answer in again)
        listens_as_listed(cluster, servers=3)
        outcomes = [(one["role"], one["outcome"]) for one in _call(f"{url}/cluster")["roles"]["changes"]]
        assert outcomes == [("decode", "done"), ("prefill", "done")]
    finally:
        cluster.close()


def _call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=120) as answer:
        return json.load(answer)
