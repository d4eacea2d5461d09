"""The share of a turn that a template repeats."""

from __future__ import annotations

import pytest

from benchmarks.agents.templates import CASES, answer, of_jinja, share, user

KEEPS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT = KEEPS.replace("{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}", "")
STRIPS = KEEPS.replace("{% if m.reasoning %}", "{% if m.reasoning and loop.last %}")


def test_a_template_that_keeps_all_repeats_all() -> None:
    assert {share(of_jinja(KEEPS), *case) for case in CASES.values()} == {1.0}


def test_reasoning_that_is_left_out_costs_what_follows_it() -> None:
    before, after = [user("x" * 10)], user("y")
    said = answer("z" * 20, reasoning="r" * 20)
    whole = len("<user></><assistant><think></think></>") + 50
    assert share(of_jinja(STRIPS), before, said, after) == pytest.approx(
        len("<user></><assistant>" + "x" * 10) / whole
    )
    assert share(of_jinja(STRIPS), before, answer("z"), after) == 1.0


def test_reasoning_that_no_message_shows_was_generated_all_the_same() -> None:
    prompt, said = len("<user></><assistant>") + 10, answer("z" * 20, reasoning="r" * 20)
    assert share(of_jinja(WITHOUT), [user("x" * 10)], said, user("y")) == pytest.approx(
        prompt / (prompt + 40 + len("</>"))
    )
