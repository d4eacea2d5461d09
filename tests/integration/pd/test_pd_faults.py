"""SIGKILL and SIGSTOP of prefill, decode and router in each state of a hand-over, and at random under load.

Deaths are placed (`pd_faults`): a hand-over is held in a state, and then a side of it is killed or stopped.
All of it is for `--long`, and takes half an hour; in portions: ``-k 'push and writing'``, ``-k 'random0'``.
test_pd_fleet.py has a selection of the most different cases.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import product

import pytest
from pd_faults import (
    FREED_SECONDS,
    UNKNOWN_SECONDS,
    Cell,
    cells,
    ended,
    killed,
    place,
    serves,
    stopped,
)
from pd_fleet import ANSWER_TOKENS, COMMON, FaultySpec, Rig, nothing_is_left, prompt_of, why_it_failed

from tests.support.compare import Answer
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.server import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(3600)]


LAYOUTS = {
    # Aggregated and in pages of one token; `test_pd` has the rest.
    "pull": ("--kv-transfer-layout", "aggregated", "--page-size", "1"),
    "push": ("--kv-transfer-layout", "aggregated", "--page-size", "1"),
    # Layers are not aggregated.
    "push-by-layer": ("--page-size", "16"),
}
RANDOM_PARTS = 8
RANDOM_DEATHS = 25
LONGEST_STOP = 4.0


@pytest.fixture(scope="module", params=LAYOUTS)
def mode(request: pytest.FixtureRequest) -> str:
    """How KV travels."""
    return str(request.param)


@pytest.fixture(scope="module")
def rig(
    mode: str, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard, truth: ServerProcess
) -> Iterator[Rig]:
    """Two prefill and two decode servers, the second of each for killing."""
    folder = tmp_path_factory.mktemp("faults")
    flags = ("--kv-pd-caching", "3", "--kv-transfer-mode", mode, *LAYOUTS[mode])
    spec = FaultySpec(flags=(*COMMON, *flags))
    names = ("prefill0", "prefill1", "decode0", "decode1")
    folders = [folder / name for name in names]
    specs = [spec.looking_at(each) for each in folders]
    with pd_servers(specs[:2], specs[2:]) as (servers, _):
        yield Rig(servers, truth, folders[:2], folders[2:], leak_guard)
        for server in servers.servers:  # some were started anew
            server.stop()


@pytest.mark.parametrize("part", range(RANDOM_PARTS), ids=lambda part: f"random{part}")
def test_servers_that_stop_at_random_give_no_wrong_answer(rig: Rig, part: int) -> None:
    """Under load. Seeded are the server, time and length of each stop; the hand-over's state is not."""
    rng = random.Random(20 + part)
    over = threading.Event()
    asked: list[tuple[list[int], Future[Answer]]] = []
    untouched: list[Future[Answer]] = []
    # The first stop of a request, its deadline, and the load.
    longest = LONGEST_STOP + UNKNOWN_SECONDS + FREED_SECONDS

    def keep_asking(client: int) -> None:
        mine = random.Random(100 * part + client)
        while not over.is_set():
            prompt = prompt_of(1, 120) + prompt_of(mine.randrange(40), 90)
            pair = {"prefill": mine.randrange(2), "decode": mine.randrange(2)}
            both = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS, **pair)
            asked.extend((prompt, answer) for answer in both)
            if not any(pair.values()):
                untouched.extend(both)
            _, hanging = wait(both, timeout=longest)
            late = [side for side, answer in zip(pair, both, strict=True) if answer in hanging]
            assert not late, f"{', '.join(late)} of {pair} let a request hang for more than {longest:.0f} s"

    with ThreadPoolExecutor(3) as clients:
        running = [clients.submit(keep_asking, client) for client in range(3)]
        try:
            for _ in range(RANDOM_DEATHS):
                time.sleep(rng.uniform(0.1, 1.0))
                kind = rng.choice(["prefill", "decode"])
                if rng.random() < 0.1:
                    with killed(rig.revive(kind)):
                        time.sleep(3)
                    rig.revive(kind)
                else:
                    with stopped(rig.revive(kind)):
                        time.sleep(rng.choice([0.3, 1.5, LONGEST_STOP]))
        finally:
            over.set()
    for each in running:
        each.result()
    truth = {prompt: rig.expected(list(prompt)) for prompt in {tuple(prompt) for prompt, _ in asked}}
    for prompt, answer in asked:
        ended(answer, truth[tuple(prompt)], UNKNOWN_SECONDS)
    rig.pd.wait_idle()
    nothing_is_left(rig.pd.servers, seconds=UNKNOWN_SECONDS)
    for number, (prefill, decode) in enumerate(product(range(2), range(2))):
        serves(rig, prefill, decode, number)
    # Only the second server of a kind is stopped or killed: a pair of the first ones answers all it is asked.
    assert untouched
    assert [why for answer in untouched if (why := why_it_failed(answer)) is not None] == []
    touched = len(asked) - len(untouched)
    good = sum(why_it_failed(answer) is None for _, answer in asked) - len(untouched)
    assert good > touched // 4, (
        f"{good} of {touched} requests to pairs of which one was stopped got an answer"
    )


ALL = list(dict.fromkeys(cell for mode in LAYOUTS for cell in cells(mode)))


@pytest.mark.parametrize("cell", ALL, ids=str)
def test_a_death_costs_the_others_nothing(rig: Rig, mode: str, cell: Cell) -> None:
    if cell not in cells(mode):
        pytest.skip(f"no such state with {mode}")
    place(rig, cell, 100 + 10 * ALL.index(cell))
