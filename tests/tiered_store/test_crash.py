"""Writers killed with SIGKILL: durable blocks are still there, and no unverified block is served."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, get_all, prefix_keys
from sglang_ext.tiered_store.disk.tier import DiskTier
from tests.support.crash import HOT, RECLAIM_STEPS, STEPS, CrashTest, config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(tmp_path: Path, step: str) -> None:
    """The put that was under way is there as a whole or not at all; all before it are there."""
    crash = CrashTest(tmp_path)
    for occurrence in (1, 5):
        crash.kill_at_step(step, occurrence)
        crash.verify()
    assert crash.kills == 2
    assert len(crash.durable) >= (0 if step == "layer_written" else 3)


@pytest.mark.parametrize("step", [*RECLAIM_STEPS, "index_prepared"])
def test_killed_while_making_room(tmp_path: Path, step: str) -> None:
    """A prefix that is moved out of a segment that goes is never nowhere."""
    crash = CrashTest(tmp_path, small=True)
    for occurrence in (1, 2):
        crash.kill_at_step(step, occurrence, after="moved" if step == "index_prepared" else "")
        crash.verify()
        tier = DiskTier(config(crash.path, small=True), LAYOUT)
        assert get_all(tier, NAMESPACE, prefix_keys(HOT, 3)) == 3
        tier.close()
    assert crash.found > 0


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("kills", [6, pytest.param(250, marks=pytest.mark.long)])
def test_killed_at_random(tmp_path: Path, small: bool, kills: int) -> None:
    choose = random.Random(kills)
    crash = CrashTest(tmp_path / "0", small=small)
    reported = 0
    for kill in range(kills):
        if kill % 50 == 49:  # a new directory: verifying all of an old one takes ever longer
            crash = CrashTest(tmp_path / str(kill), small=small)
        before = len(crash.durable)
        crash.kill_at_random(choose)
        reported += len(crash.durable) - before
        crash.verify()
    assert reported > 5 * kills
    assert crash.found > 0
