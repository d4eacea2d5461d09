"""Delays in the moments of tokens, without an instance."""

from __future__ import annotations

from itertools import accumulate

import pytest

from sglang_ext.calibration.instance import delay_in
from sglang_ext.errors import PeerError

STEP, PASS = 0.02, 0.08


@pytest.mark.parametrize(
    "gaps",
    [
        pytest.param([PASS + STEP], id="a pass before a step"),
        pytest.param([PASS, 2 * STEP], id="results that are late"),
        pytest.param([STEP + 0.03, PASS - 0.03 + STEP], id="in two parts"),
    ],
)
def test_the_pass_of_another_prompt_is_the_delay(gaps: list[float]) -> None:
    moments = [0.0, *accumulate([STEP] * 12 + gaps + [STEP] * 12)]
    assert delay_in(moments) == pytest.approx(PASS)


def test_a_few_tokens_say_nothing() -> None:
    with pytest.raises(PeerError, match="too few"):
        delay_in([0.0, 0.1, 0.2])
