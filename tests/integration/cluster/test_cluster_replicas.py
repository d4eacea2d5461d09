"""`sglang-ext cluster` whose servers have replicas (``--dp-size``, DP attention), with PD and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
from test_cluster import START_S, RunningCluster, json_of, sent
from test_cluster_families import ANSWER_TOKENS
from test_hybrid_tiers import random_tokens

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(5 * START_S)]

TURN = 200
CONVERSATIONS = 6
LIMITS = ("--max-running-requests", "2", "--chunked-prefill-size", "128", "--sleep-on-idle")
ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")


@dataclass(frozen=True)
class Fleet:
    """A cluster: its model, and its flags before and after ``--``."""

    model: str
    roles: tuple[str, ...]
    flags: tuple[str, ...] = ("--dp-size", "2")

    @property
    def prefills(self) -> int:
        """Replicas that compute prompts: all, or those of the server that prefills."""
        return 2 if "--prefill" in self.roles else 4


FLEETS = {
    "replicas": Fleet("tiny", ("--colocated", "2")),
    "replicas-pd": Fleet("tiny", ("--prefill", "1", "--decode", "1")),
    "attention": Fleet("tiny-mla-moe", ("--colocated", "2"), ATTENTION),
}


@pytest.fixture(scope="module", params=FLEETS.values(), ids=FLEETS)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, str, ServerProcess]]:
    """A fleet, its router's address, and a server of SGLang alone."""
    fleet: Fleet = request.param
    alone = (*LIMITS, "--max-total-tokens", "8192", "--disable-radix-cache")
    with (
        ServerProcess(ServerSpec(model=fleet.model, flags=alone)) as truth,
        closing(
            RunningCluster(
                tmp_path_factory.mktemp("fleet"),
                *fleet.roles,
                flags=(*LIMITS, *fleet.flags, "--dtype", "float32", "--enable-cache-report"),
                model=fleet.model,
            )
        ) as cluster,
    ):
        url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", 3 * START_S)[1]
        yield fleet, url, truth


def test_every_replica_serves_and_later_turns_find_the_earlier_ones(
    running: tuple[Fleet, str, ServerProcess],
) -> None:
    """Each server's replicas are instances of their own, and answers are those of a server without any."""
    fleet, url, truth = running
    wait_until(lambda: len(usable(url)) == 4, seconds=60.0, what="all replicas")
    assert {name.rpartition("#")[2] for name in usable(url)} == {"dp0", "dp1"}
    homes: list[tuple[list[int], str]] = []
    for number in range(CONVERSATIONS):
        prompt = random_tokens(TURN, seed=number)
        answer, home = said(url, prompt)
        assert_same(truth.generate(prompt, max_new_tokens=ANSWER_TOKENS), answer, atol=1e-4)
        homes.append((prompt + answer.tokens, home))
    assert len({home for _, home in homes}) == fleet.prefills
    for number, (history, home) in enumerate(homes):
        prompt = history + random_tokens(30, seed=100 + number)
        answer, later = said(url, prompt)
        assert later == home
        assert answer.cached_tokens >= TURN // 16 * 16
        assert_same(truth.generate(prompt, max_new_tokens=ANSWER_TOKENS), answer, atol=1e-4)


def usable(url: str) -> set[str]:
    """URLs of the instances that a router has."""
    return {each["url"] for each in json_of(f"{url}/cluster")["instances"] if "#" in each["url"]}


def said(url: str, prompt: list[int]) -> tuple[Answer, str]:
    """The answer of a fleet, as `ServerProcess.generate` asks for it, and the replica of the prompt."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    answer, headers = sent(url, body)
    return Answer.of(answer), headers.get("x-kv-prefill-instance") or headers["x-kv-instance"]
