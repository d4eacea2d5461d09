"""``sglang-ext gpu-check``'s steps with servers, on an emulated GPU (``tests.fake_gpu``): the rows and the
exit status where answers are right, and where DRAM, disk and hand-overs are damaged.

The steps without a server are in ``tests/gpu_check``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from emulated_gpu import ATOL, HBM_TOKENS, PROMPT_TOKENS, damage, damage_disk
from hooked_server import FOLDER

from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.gpu_check import command, facts, serving
from sglang_ext.testing.models import model_path

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

SERVER = Path(__file__).parents[1] / "servers" / "gpu_pd_server.py"
TIERS = ["HBM", "DRAM", "disk", "computed, handed over", "HBM, handed over"]
SUBJECTS = ["server"] * 3 + ["prefill/decode"] * 2


@pytest.fixture
def check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[], tuple[int, dict[str, Any]]]:
    """The command with a server on the emulated GPU and a tiny model: its exit status and JSON."""
    plan = partial(
        serving.Plan,
        run=(str(SERVER),),
        # SGLang's deterministic operators ask for tensors on CUDA, which the emulator's are not.
        flags=("--dtype", "float32", "--skip-server-warmup"),
        prompt=PROMPT_TOKENS,
        pool=HBM_TOKENS,
        start_seconds=900.0,
    )
    monkeypatch.setattr(serving, "Plan", plan)
    monkeypatch.setattr(serving, "FLOOR", ATOL)
    # This process has no GPU; the server's processes have.
    monkeypatch.setattr(facts, "no_gpu", lambda: None)
    monkeypatch.setattr(facts, "pairs", lambda: Finding(Level.OK, "prefill/decode", ""))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(command, "quick_steps", list)

    def run() -> tuple[int, dict[str, Any]]:
        status = command.main(["--json", "--model-path", str(model_path("tiny", "float32"))])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return status, found

    return run


def test_a_server_whose_tiers_give_the_computed_answer_is_well(
    check: Callable[[], tuple[int, dict[str, Any]]],
) -> None:
    status, found = check()
    rows = found["findings"]
    assert [(row["subject"], row["level"]) for row in rows] == [(name, "ok") for name in SUBJECTS], rows
    assert [row["text"].partition(":")[0] for row in rows] == TIERS
    assert all("the same answer" in row["text"] for row in rows)
    assert (status, found["problems"], found["verdict"]) == (0, 0, "All is well.")


def test_damage_in_dram_on_disk_and_on_the_way_is_a_problem_of_each(
    check: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The twin. DRAM is damaged once it has the prompt; files on disk, with checksums that fit, before the
    restart; a bit of the KV that decode has read, before it is used."""
    (tmp_path / "damage").touch()
    ask, servers = serving.ask, serving.servers
    asked, started = 0, 0

    def ask_of_damaged(*args: Any, **more: Any) -> serving.Answer:
        nonlocal asked
        asked += 1
        # Computed twice, from HBM, prompts that push it out of there, and then from DRAM.
        if asked == 4 + HBM_TOKENS // PROMPT_TOKENS + 2:
            with damage(os.getpid()):
                return ask(*args, **more)
        return ask(*args, **more)

    @contextmanager
    def servers_with_damaged_disk(
        plan: serving.Plan, parts: Mapping[str, Sequence[str]]
    ) -> Iterator[list[str]]:
        nonlocal started
        started += 1
        if started == 2:
            damage_disk(plan.folder / "disk")
        with servers(plan, parts) as urls:
            yield urls

    monkeypatch.setattr(serving, "ask", ask_of_damaged)
    monkeypatch.setattr(serving, "servers", servers_with_damaged_disk)
    status, found = check()
    rows = found["findings"]
    assert [row["text"].partition(":")[0] for row in rows] == TIERS
    assert [row["level"] for row in rows] == ["ok", *["problem"] * 4], rows
    assert all("ANOTHER ANSWER" in row["text"] and "Do not serve" in row["advice"] for row in rows[1:])
    assert (status, found["problems"], found["verdict"]) == (1, 4, "4 problems, 0 warnings.")
