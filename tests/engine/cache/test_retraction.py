"""Whether running requests give way, and which: from numbers alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.retraction import (
    UNFELT,
    Retraction,
    Running,
    Verdict,
    Wanting,
    Why,
    obstacle,
    steps_to_wait,
    weigh,
    whom_to_retract,
)
from sglang_ext.testing.fakes import FakeClock

STEP = 0.01


def low(remaining: int = 100, held: int = 50, **about: Any) -> Running:
    return Running(**{"priority": 0, "remaining": remaining, "held": held, **about})


def place(**about: Any) -> Wanting:
    """A request of priority 10 that lacks a place."""
    return Wanting(**{"priority": 10, "tokens": 0, "rows": 1, **about})


def slots(tokens: int) -> Wanting:
    return place(tokens=tokens, rows=0)


def judged(want: Wanting, *running: Running, wait_s: float = 0.5, step_s: float | None = STEP) -> Verdict:
    return weigh(want, running, step_s=step_s, wait_s=wait_s)


def test_who_fits_takes_nothing_from_others() -> None:
    assert judged(Wanting(10, -3, 0), low()) == Verdict((), Why.ROOM, 0.0)


def test_a_short_wait_is_no_reason() -> None:
    assert judged(place(), low(remaining=50)) == Verdict((), Why.SHORT, 0.5)
    assert judged(place(), low(remaining=51)) == Verdict((0,), Why.SLOWER, 0.51)


def test_the_first_to_end_counts_whatever_its_priority() -> None:
    assert judged(place(), low(), low(remaining=7, priority=10)).why is Why.SHORT


def test_a_wait_is_not_felt_beside_a_long_prefill() -> None:
    wait = 1.0
    assert judged(place(compute_s=wait / UNFELT), low()).why is Why.SHORT
    assert judged(place(compute_s=0.9 * wait / UNFELT), low()).why is Why.SLOWER


def test_no_wait_is_accepted_with_zero() -> None:
    assert judged(place(compute_s=100.0), low(remaining=1), wait_s=0.0).retract == (0,)


def test_before_any_step_was_measured_others_give_way() -> None:
    assert judged(place(), low(remaining=1), step_s=None) == Verdict((0,), Why.UNMEASURED)


def test_the_lowest_priority_goes_first_then_the_least_kv_then_who_came_last() -> None:
    running = [low(priority=1, held=1), low(held=30), low(held=20), low(held=20)]
    assert whom_to_retract(place(), running) == (3,)
    assert whom_to_retract(place(rows=2), running) == (3, 2)
    assert whom_to_retract(place(rows=4), running) == (3, 2, 1, 0)


def test_no_more_requests_are_retracted_than_needed() -> None:
    running = [low(held=10), low(held=20), low(held=90)]
    assert whom_to_retract(slots(80), running) == (2,)
    assert whom_to_retract(slots(95), running) == (0, 2)


def test_no_request_is_retracted_in_vain() -> None:
    assert judged(slots(200), low(held=50), low(held=50)).why is Why.NOBODY
    assert whom_to_retract(place(rows=2), [low(), low(retractable=False)]) == ()


def test_priorities_have_to_differ_by_more_than_the_threshold() -> None:
    assert whom_to_retract(place(), [low()], threshold=10) == ()
    assert whom_to_retract(place(), [low()], threshold=9) == (0,)
    assert whom_to_retract(place(), [low(priority=10)]) == ()


def test_who_has_ended_already_leaves_at_once() -> None:
    assert judged(place(), low(), low(remaining=0, held=0, retractable=False)).why is Why.SHORT


def test_slots_come_free_as_requests_end() -> None:
    running = [low(remaining=10, held=40), low(remaining=30, held=40)]
    assert steps_to_wait(slots(30), [low(remaining=10, held=40)]) == 10
    # The other one takes 10 slots until then that are not kept for it.
    assert steps_to_wait(slots(30), running) == 10
    assert steps_to_wait(slots(31), running) == 30
    assert steps_to_wait(slots(81), running) == math.inf


def test_slots_that_are_kept_for_a_request_are_not_taken_from_others() -> None:
    kept = [low(remaining=10, held=40, reserved=10.0), low(remaining=30, held=40, reserved=30.0)]
    assert steps_to_wait(slots(50), kept) == 10
    assert steps_to_wait(slots(51), kept) == 30


@pytest.mark.parametrize("seed", range(200))
def test_the_choice_is_enough_allowed_and_without_excess(seed: int) -> None:
    rng = random.Random(seed)
    running = [
        low(
            rng.randrange(1, 50),
            rng.randrange(60),
            priority=rng.randrange(4),
            retractable=rng.random() < 0.8,
        )
        for _ in range(rng.randrange(6))
    ]
    want = Wanting(2, rng.randrange(-10, 120), rng.randrange(3))
    if want.has_room():
        return

    def enough(who: Sequence[int]) -> bool:
        return want.has_room(*(running[index] for index in who))

    allowed = [index for index, each in enumerate(running) if each.retractable and each.priority < 2]
    chosen = whom_to_retract(want, running)
    assert set(chosen) <= set(allowed)
    assert bool(chosen) == enough(allowed)
    if chosen:
        assert enough(chosen)
        assert not any(enough(fewer) for fewer in itertools.combinations(chosen, len(chosen) - 1))


# -- inputs of the decision ---------------------------------------------------------------------------------


def request(**about: Any) -> Any:
    plain = {
        "output_ids": [1, 2],
        "return_logprob": False,
        "sampling_params": SimpleNamespace(
            frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0
        ),
        **dict.fromkeys(
            (
                *(
                    "custom_logit_processor",
                    "multimodal_inputs",
                    "input_embeds",
                    "positional_embed_overrides",
                ),
                *("beam_group", "customized_info"),
            )
        ),
        **dict.fromkeys(
            (
                *("return_hidden_states", "return_routed_experts", "return_indexer_topk"),
                "return_sampling_mask",
            ),
            False,
        ),
    }
    return SimpleNamespace(**{**plain, **about})


def sampling(**about: Any) -> Any:
    made = request().sampling_params
    for name, value in about.items():
        setattr(made, name, value)
    return made


def test_who_would_go_on_otherwise_is_not_retracted() -> None:
    assert not obstacle(request())
    assert not obstacle(request(sampling_params=sampling(min_new_tokens=2)))
    for lost in (
        {"output_ids": []},
        {"return_logprob": True},
        {"sampling_params": sampling(frequency_penalty=0.1)},
        {"sampling_params": sampling(repetition_penalty=1.1)},
        {"sampling_params": sampling(min_new_tokens=3)},
        {"custom_logit_processor": "one"},
        {"input_embeds": [[0.0]]},
        {"beam_group": object()},
        {"return_hidden_states": True},
    ):
        assert obstacle(request(**lost)), lost


def steps(retraction: Retraction, clock: FakeClock, *seconds: float) -> None:
    for each in seconds:
        clock.advance(each)
        retraction.decoded()


def test_a_step_is_what_lies_between_two_results() -> None:
    clock = FakeClock()
    retraction = Retraction(0.5, Ranks(), clock)
    steps(retraction, clock, 3.0)
    assert retraction.judge(place(), [low()], 0) == Verdict((0,), Why.UNMEASURED)
    steps(retraction, clock, STEP)
    verdict = retraction.judge(place(), [low()], 0)
    assert verdict is not None
    assert verdict.wait_s == pytest.approx(100 * STEP)
    # A prefill in between is none, and a pause counts as a few steps.
    retraction.interrupted()
    steps(retraction, clock, 5.0, 9.0)
    verdict = retraction.judge(place(), [low()], 0)
    assert verdict is not None
    assert verdict.wait_s == pytest.approx(100 * STEP * 1.6)


def test_ranks_agree_on_the_step_before_they_decide() -> None:
    """Each has its own time; one alone would decide otherwise than the other."""
    said: list[list[int]] = []
    clock = FakeClock()

    def least(numbers: Sequence[int]) -> Sequence[int]:
        said.append(list(numbers))
        return [
            min(number, 5_000_000) if index >= 2 and number else number
            for index, number in enumerate(numbers)
        ]

    ranks = Ranks(least)
    retraction = Retraction(0.5, ranks, clock)
    steps(retraction, clock, 1.0, STEP)
    ranks.each_pass()
    assert not said  # numbers are compared only once a request waits
    assert retraction.judge(place(), [low()], 0) is None
    ranks.each_pass()
    assert said[0][2] == 10_000_000
    verdict = retraction.judge(place(), [low()], 0)
    assert verdict is not None
    assert (verdict.why, verdict.wait_s) == (Why.SHORT, pytest.approx(0.5))
    ranks.each_pass()
    ranks.each_pass()
    assert retraction.judge(place(), [low()], 0) is None  # that was long ago


def test_ranks_that_know_nothing_agree_on_that() -> None:
    ranks = Ranks(lambda numbers: numbers)
    retraction = Retraction(0.5, ranks, FakeClock())
    assert retraction.judge(place(), [low()], 0) is None
    ranks.each_pass()
    assert retraction.judge(place(), [low()], 0) == Verdict((0,), Why.UNMEASURED)
