"""Models with windows or states whose KV comes back from DRAM and from disk: the answers are those without a
cache, and every component counts.

SGLang's tree keeps HBM; the tiers below it have the KV of every page, and windows or states where SGLang
keeps them. With ``no_buffer`` that is the end of a request, so later turns of a conversation are asked.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from disk_damage import Place, damage_last_layer, runs
from hooked_server import FOLDER
from tuned_model import tuned

from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import assert_same
from tests.support.servers.server import STRICT, Answer, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

ANSWER_TOKENS = 8
TURN = 160
CONVERSATIONS = 6
HBM_TOKENS = 900
"""Fewer than two turns of all conversations have."""
STATES = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--page-size", "1"),
    *("--max-mamba-cache-size", "16"),
)
WINDOWS = ("--page-size", "16", "--swa-full-tokens-ratio", "0.5")
LISTED = ("--attention-backend", "intel_amx")
"""SGLang starts some models with the backends of a list only. Without AMX, this one is `torch_native`."""
TWO_RANKS = ("--tp", "2")
MODELS = {
    "tiny-gdn": (STATES, "state"),
    "tiny-mamba2": (STATES, "state"),
    "tiny-kda": (STATES, "state"),
    "tiny-lfm2": (STATES, "state"),
    "tiny-spark": (WINDOWS, "window"),
    "tiny-mimo": ((*WINDOWS, *LISTED), "window"),
    "tiny-gemma4": ((*WINDOWS, *LISTED), "window"),
    "tiny-step": (WINDOWS, "window"),
    "tiny-gdn-tp2": ((*STATES, *TWO_RANKS), "state"),
    "tiny-spark-tp2": ((*WINDOWS, *TWO_RANKS), "window"),
    "tiny-mimo-tp2": ((*WINDOWS, *LISTED, *TWO_RANKS), "window"),
    "tiny-gemma4-tp2": ((*WINDOWS, *LISTED, *TWO_RANKS), "window"),
    "tiny-step-tp2": ((*WINDOWS, *TWO_RANKS), "window"),
}
SHORT = ("tiny-gdn",)
RUN = (str(Path(__file__).parents[1] / "servers" / "unfenced_server.py"),)


@dataclass
class Played:
    """Two turns of each conversation at the first server, and the answers to the third without a cache."""

    kind: str
    folder: Path
    histories: list[list[int]]
    thirds: list[list[int]]
    cold: list[Answer]
    marks: list[set[Place]]
    """Runs on disk before the second turn of each conversation, and at the end."""

    def written(self, component: str, conversation: int) -> set[Place]:
        """The runs of a component that a conversation's second turn wrote."""
        ours = self.marks[conversation] - self.marks[conversation - 1]
        return {place for place in ours if component in place[0].parts}


def model_of(kind: str) -> str:
    return kind.removesuffix("-tp2")


def spec(kind: str, folder: Path) -> ServerSpec:
    """folder: of the disk tier, below which is also that of the server's faults."""
    flags, _ = MODELS[kind]
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if TWO_RANKS[0] in flags else {}
    return ServerSpec(
        model=model_of(kind),
        run=RUN,
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", *flags),
            *("--kv-dram-size", "64MB", "--kv-disk-path", str(folder), "--kv-disk-size", "1GB"),
            *(
                "--max-total-tokens",
                str(HBM_TOKENS),
                "--max-running-requests",
                "2",
                "--chunked-prefill-size",
                "128",
            ),
        ),
        environment={
            "SGLANG_MAMBA_CONV_DTYPE": "float32",
            FOLDER: str(folder.with_name("faults")),
            **STRICT,
            **ranks,
        },
    )


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(count)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long, id=kind) for kind in MODELS],
)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A server that was asked two turns of each conversation, and ended; second turns left HBM meanwhile."""
    kind, folder = request.param, tmp_path_factory.mktemp("hybrid") / "kv"
    folder.with_name("faults").mkdir()
    histories = [random_tokens(TURN, seed) for seed in range(CONVERSATIONS)]
    marks: list[set[Place]] = []
    from_dram = 0
    with ServerProcess(spec(kind, folder)) as server:
        for number in range(2):
            for index, history in enumerate(histories):
                if number:
                    marks.append(settled(folder))
                history += random_tokens(20 * number, seed=100 + index)
                warm = server.generate(history, max_new_tokens=ANSWER_TOKENS)
                if number:
                    cold = server.generate(history, max_new_tokens=ANSWER_TOKENS, cache_salt=f"cold {index}")
                    assert cold.cached_tokens == 0
                    assert warm.dram_tokens + warm.disk_tokens >= TURN - 16, "the first turn left HBM"
                    from_dram += warm.dram_tokens
                    assert_same(cold, warm)
                history += warm.tokens
        thirds = [history + random_tokens(30, seed=200 + index) for index, history in enumerate(histories)]
        cold = [
            server.generate(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt=f"cold {index} again")
            for index, prompt in enumerate(thirds)
        ]
        marks.append(settled(folder))
    assert from_dram, "DRAM had nothing"
    return Played(kind, folder, histories, thirds, cold, marks)


def settled(folder: Path) -> set[Place]:
    """The runs on disk once nothing more is written."""
    seen: list[set[Place]] = [set()]

    def still() -> bool:
        time.sleep(0.5)
        seen.append(runs(folder))
        return bool(seen[-1]) and seen[-1] == seen[-2]

    wait_until(still, seconds=20, what="the disk to be quiet")
    return seen[-1]


@pytest.fixture(scope="module")
def server(played: Played) -> Iterator[ServerProcess]:
    """The next server on the same directory. States or windows of the last conversation are damaged with
    forged checksums, KV of the one before without."""
    component = MODELS[played.kind][1]
    forged, seen = played.written(component, -1), played.written("full", -2)
    assert forged
    assert seen
    damage_last_layer(forged, spoil, forge=True)
    damage_last_layer(seen, spoil, forge=False)
    for rank in (played.folder / component).iterdir():
        # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
        shutil.rmtree(rank / INDEX_DIRECTORY)
        repair_directory(rank)
    with ServerProcess(spec(played.kind, played.folder)) as server:
        yield server


def spoil(layer: bytearray) -> None:
    """Invert the highest bit of the exponent of some float32 values."""
    for at in range(3, len(layer), 64):
        layer[at] ^= 0x40


def test_a_restart_goes_on_from_disk(server: ServerProcess, played: Played) -> None:
    for prompt, history, cold in list(zip(played.thirds, played.histories, played.cold, strict=True))[:-2]:
        warm = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        assert warm.disk_tokens >= len(history) - 17
        assert_same(cold, warm)


def test_other_tenants_find_nothing(server: ServerProcess, played: Played) -> None:
    for fields in ({"cache_salt": "other"}, {"extra_key": "other"}):
        assert server.generate(played.thirds[0], max_new_tokens=1, **fields).cached_tokens == 0


def test_cold_hit_churn_host_and_host_again(server: ServerProcess) -> None:
    """sglang#39830. Each turn is a later one: a state is kept at the end of a request."""
    history: list[int] = []
    below = []
    for leg, new in enumerate((TURN, 20, 20, 21)):
        if leg == 2:
            for seed in range(HBM_TOKENS // TURN + 3):
                server.generate(random_tokens(TURN, 400 + seed), max_new_tokens=1)
        prompt = history + random_tokens(new, 300 + leg)
        warm = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        cold = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt=f"leg {leg}")
        assert cold.cached_tokens == 0
        assert warm.cached_tokens >= len(history) - 17
        assert_same(cold, warm)
        below.append(warm.dram_tokens + warm.disk_tokens)
        if leg < 2:
            history = [*prompt, *warm.tokens]
    assert below[:2] == [0, 0], "the prompt was in HBM"
    assert below[2] >= len(history) - 17, "the prompt left HBM"


def test_a_damaged_state_or_window_changes_the_answer(server: ServerProcess, played: Played) -> None:
    """The twin: answers depend on the bytes from disk, also where these are no KV of a token."""
    damaged = server.generate(played.thirds[-1], max_new_tokens=ANSWER_TOKENS)
    assert damaged.disk_tokens >= len(played.histories[-1]) - 17
    with pytest.raises(AssertionError):
        assert_same(played.cold[-1], damaged)


def test_damage_that_checksums_show_is_a_miss(server: ServerProcess, played: Played) -> None:
    """KV that the second turn wrote is damaged: the conversation goes on from the first."""
    warm = server.generate(played.thirds[-2], max_new_tokens=ANSWER_TOKENS)
    assert warm.disk_tokens < len(played.histories[-2]) - 17
    assert_same(played.cold[-2], warm)


def test_flushing_empties_every_tier(server: ServerProcess, played: Played) -> None:
    server.flush()
    assert server.generate(played.thirds[0], max_new_tokens=1).cached_tokens == 0


def update(server: ServerProcess, model: Path) -> None:
    """New weights, and no flush: as reinforcement learning does it."""
    server.post("/pause_generation", {"mode": "in_place"})
    server.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": False})
    server.post("/continue_generation", {})


def leave_hbm(server: ServerProcess, seed: int) -> None:
    for number in range(HBM_TOKENS // TURN + 1):
        server.generate(random_tokens(TURN, seed + number), max_new_tokens=1)


def test_new_weights_find_nothing_that_others_computed(
    server: ServerProcess, played: Played, tmp_path: Path, long_run: bool
) -> None:
    """Not in HBM, in DRAM or on disk. The first weights, once they are back, find their own on disk."""

    def answered(prompt: list[int], **fields: str) -> Answer:
        return server.generate(prompt, max_new_tokens=ANSWER_TOKENS, **fields)

    model = model_of(played.kind)
    first, fine_tune = model_path(model), tuned(model_path(model), tmp_path / "tuned")
    history = random_tokens(TURN, 500)
    history += [*answered(history).tokens, *random_tokens(30, 501)]
    with_first = answered(history)
    assert with_first.hbm_tokens >= TURN - 16
    settled(played.folder)
    update(server, fine_tune)
    with_tuned = answered(history)
    assert with_tuned.cached_tokens == 0
    with pytest.raises(AssertionError):
        assert_same(with_first, with_tuned)
    if long_run:
        with ServerProcess(replace(spec(played.kind, tmp_path / "kv"), run=ServerSpec.run)) as fresh:
            update(fresh, fine_tune)
            assert_same(fresh.generate(history, max_new_tokens=ANSWER_TOKENS), with_tuned)
    leave_hbm(server, 510)
    longer = [*history, *with_tuned.tokens, *random_tokens(30, 502)]
    later = answered(longer)
    assert later.dram_tokens >= len(history) - 17
    assert_same(answered(longer, cache_salt="cold, tuned"), later)
    update(server, first)
    again = answered(history)
    assert again.disk_tokens >= TURN - 16
    assert_same(with_first, again)
    # The twin: the cache does not learn of new weights.
    no_fence = played.folder.with_name("faults") / "no-fence"
    no_fence.touch()
    update(server, fine_tune)
    mixed = answered(longer)
    assert mixed.cached_tokens >= TURN - 16
    with pytest.raises(AssertionError):
        assert_same(later, mixed)
    server.flush()
