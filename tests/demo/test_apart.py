"""The demo's part with prefill and decode apart: its report, from numbers."""

from __future__ import annotations

from examples.demo import apart
from examples.demo.apart import Turn, decode_had, grows, lines

UNIT = 2048


def held(*sent: int, prefill: tuple[int, ...]) -> list[Turn]:
    return [
        Turn(number + 1, 400 + 80 * number, prefill[number], tokens * UNIT, (number,))
        for number, tokens in enumerate(sent)
    ]


ONE = held(400, 480, 560, prefill=(0, 400, 480))
THREE = held(400, 48, 48, prefill=(0, 432, 512))


def test_what_decode_had_is_what_was_not_sent() -> None:
    assert decode_had(ONE) == [0, 0, 0]
    assert decode_had(THREE) == [0, 432, 512]


def test_it_has_to_grow_under_3_and_under_1_not() -> None:
    assert grows({"1": ONE, "3": THREE})
    assert not grows({"1": THREE, "3": THREE})
    assert not grows({"1": ONE, "3": ONE})


def test_the_report_has_a_line_per_turn_and_a_sum() -> None:
    text = lines({"1": ONE, "3": THREE})
    assert text[1].split()[:2] == ["turn", "prompt"]
    assert text[3].split() == ["2", "480", "400", "0", "960", "432", "432", "96"]
    assert len({len(line) for line in text[1:5]}) == 1
    assert text[-1] == (
        "Under 3, prefill computed 496 prompt tokens instead of 560, and 992 KiB went to decode instead of "
        "2,880. Answers equal: 3 of 3."
    )


def test_each_design_has_a_decode_server_of_its_own() -> None:
    assert apart.instance_args() == {2: ("--kv-pd-caching", "1"), 1: ("--kv-pd-caching", "3")}
