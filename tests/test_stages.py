"""A request's time by stage: the stages add up, and a delay shows in its own stage."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from sglang_ext.stages import NO_STAGES, STAGES, Handed, Moments, StageTimes, computed, received

AT = Moments(received=100.0, forwarded=100.2, prefilled=100.5)
NOW = 102.0


def test_what_one_server_does_adds_up() -> None:
    stages = computed(AT, NOW, hands_over=False)
    assert dict(stages.items()) == pytest.approx(
        {"prefill_queue": 0.2, "prefill": 0.3, "transfer": 0.0, "decode_queue": 0.0, "decode": 1.5}
    )
    assert stages.total == pytest.approx(NOW - AT.received)


def test_after_its_last_token_a_prefill_server_transfers() -> None:
    assert dict(computed(AT, NOW, hands_over=True).items()) == pytest.approx(
        {"prefill_queue": 0.2, "prefill": 0.3, "transfer": 1.5, "decode_queue": 0.0, "decode": 0.0}
    )


@pytest.mark.parametrize("at", [Moments(100.0), Moments(100.0, 101.0)])
def test_a_request_that_ended_early_has_what_it_passed(at: Moments) -> None:
    stages = computed(at, NOW, hands_over=False)
    assert stages.total == pytest.approx(2.0)
    assert stages.decode == 0.0


HANDED = Handed(came=101.0, before=StageTimes(0.1, 0.3), waited=0.25, read=0.05)


def over_both(at: Moments, now: float, handed: Handed) -> StageTimes:
    return handed.before + received(at, now, handed)


def test_what_two_servers_do_adds_up() -> None:
    stages = over_both(Moments(100.0, 101.1), NOW, HANDED)
    assert stages.total == pytest.approx(2.0)
    assert stages.transfer == pytest.approx(1.0 - 0.25 - 0.4)
    assert stages.decode_queue == pytest.approx(0.25 + 0.1)


def test_prefill_may_have_begun_long_before() -> None:
    stages = over_both(Moments(100.0, 101.1), NOW, replace(HANDED, before=StageTimes(5.0, 3.0)))
    assert stages.transfer == pytest.approx(HANDED.read)


LATER = 0.7


@pytest.mark.parametrize("stage", STAGES)
def test_a_delay_shows_in_its_stage_only(stage: str) -> None:
    """Twin: when one moment is late, one stage is longer by as much, and every other stays."""
    at, now, handed = Moments(100.0, 101.1), NOW + LATER, replace(HANDED, came=101.0 + LATER)
    late = Moments(100.0, 101.1 + LATER)
    match stage:
        case "prefill_queue":
            got = over_both(late, now, replace(handed, before=HANDED.before + StageTimes(LATER)))
        case "prefill":
            got = over_both(late, now, replace(handed, before=HANDED.before + StageTimes(0.0, LATER)))
        case "transfer":
            got = over_both(late, now, replace(handed, read=HANDED.read + LATER))
        case "decode_queue":
            got = over_both(late, now, replace(handed, waited=HANDED.waited + LATER))
        case _:
            got = over_both(at, now, HANDED)
    before = dict(over_both(at, NOW, HANDED).items())
    before[stage] += LATER
    assert dict(got.items()) == pytest.approx(before)


def test_no_kv_came() -> None:
    assert dict(received(Moments(100.0), NOW, None).items()) == {
        **dict.fromkeys(STAGES, 0.0),
        "transfer": 2.0,
    }


def test_an_answer_tells_them_in_whole_microseconds() -> None:
    stages = StageTimes(0.1, 0.25, 0.001, 0.0, 1.5)
    details = stages.details()
    assert details["stage_prefill_us"] == 250_000
    assert StageTimes.of_details({"device": 3, **details}) == stages


@pytest.mark.parametrize("wrong", [None, -1, 1.5, True, "1", 10**30, []])
def test_what_is_no_stage_is_none(wrong: object) -> None:
    assert StageTimes.of_details({**NO_STAGES.details(), "stage_decode_us": wrong}) is None
    assert StageTimes.of_details({}) is None


@pytest.mark.parametrize(
    "wrong", [{"decode": -1.0}, {"decode": 1e9}, {"decode": float("nan")}, {"more": 1.0}]
)
def test_a_peer_cannot_tell_nonsense(wrong: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=StageTimes)
