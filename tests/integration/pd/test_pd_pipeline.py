"""Prefill or decode in stages of a pipeline: each stage gives, or takes, the layers that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hooked_server import FOLDER
from pd_fleet import (
    ANSWER_TOKENS,
    COMMON,
    TRUTH,
    FaultySpec,
    fault,
    nothing_is_left,
    one_side_is_updated_first,
    prompt_of,
    why_it_failed,
)

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import assert_same, random_conversations
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200), pytest.mark.long]

MODEL = "tiny-untied"
"""Three layers, of which the stages have one and two."""
DRAM = ("--kv-dram-size", "64MiB")
STAGES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which decode looks for faults."""
    return tmp_path_factory.mktemp("decode-faults")


@dataclass(frozen=True)
class Kind:
    """The stages of prefill and of decode, and flags of prefill's."""

    prefill: int
    decode: int
    flags: tuple[str, ...] = ()
    model: str = MODEL


KINDS = {
    "2-to-1": Kind(2, 1),
    "2-to-1-dram": Kind(2, 1, DRAM),
    "2-to-1-basic": Kind(2, 1, ("--kv-pd-caching", "basic")),
    "1-to-2": Kind(1, 2),
    "2-to-2": Kind(2, 2, DRAM),
    "tiny-moe-2-to-2": Kind(2, 2, DRAM, "tiny-moe"),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def truth(kind: Kind, get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    return get_server(replace(TRUTH, model=kind.model))


@pytest.fixture(scope="module")
def pd(kind: Kind, faults: Path) -> Iterator[PdServers]:
    common = (*COMMON, "--page-size", "16", "--kv-pd-caching", "1")
    base = ServerSpec(model=kind.model, flags=common, environment={**STRICT, **STAGES})
    prefill = replace(base, flags=(*base.flags, "--pp-size", str(kind.prefill), *kind.flags))
    decode = replace(
        base,
        flags=(*(each for each in base.flags if each != "--kv-check"), "--pp-size", str(kind.decode)),
        run=FaultySpec.run,
        environment={**base.environment, FOLDER: str(faults)},
    )
    with pd_servers([prefill], [decode]) as (found, _):
        yield found


def test_conversations_get_the_answers_of_one_server(pd: PdServers, truth: ServerProcess) -> None:
    conversations = random_conversations(seed=9, count=5, turns=(2, 3), tokens=(8, 300), system_tokens=60)
    for turns in conversations:
        history: list[int] = []
        for added in turns:
            history = history + added
            answer = pd.generate(history, max_new_tokens=ANSWER_TOKENS)
            assert_same(truth.generate(history, max_new_tokens=ANSWER_TOKENS), answer, atol=1e-4)
            history = history + answer.tokens
    pd.wait_idle()
    nothing_is_left(pd.servers)


def test_one_damaged_bit_is_another_answer(pd: PdServers, truth: ServerProcess, faults: Path) -> None:
    """The twin of the test above: one bit of the received KV, at decode."""
    prompt = prompt_of(5, 203)
    with fault(faults, "damage"):
        damaged = pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(truth.generate(prompt, max_new_tokens=ANSWER_TOKENS), damaged, atol=1e-4)
    pd.wait_idle()
    for server in pd.servers:
        server.flush()


def test_weights_updated_on_one_side_end_requests_until_the_other_has_them_too(
    kind: Kind, pd: PdServers, truth: ServerProcess, tmp_path: Path
) -> None:
    """A stage loads them when the one before it has: until then requests end as well."""

    def answers() -> bool:
        both = pd.start(prompt_of(72, 40), max_new_tokens=1)
        return [why_it_failed(each) for each in both] == [None, None]

    one_side_is_updated_first(
        pd,
        truth,
        tmp_path,
        kind.model,
        lambda: wait_until(answers, seconds=60, what="all stages' new weights"),
    )
