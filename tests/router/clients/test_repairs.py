"""Repairs of prompts: each rule changes its part, and a twin with the same words elsewhere stays as it is."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest

from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.clients.repairs import Repair, repair
from sglang_ext.router.clients.rules import Rule, parse_rules, shipped

RULES = {rule.name: rule for rule in shipped().rules}
ON = tuple(rule for rule in shipped().rules if rule.on)
BILLING = "x-anthropic-billing-header: cc_version=2.1.245.2ef; cc_entrypoint=cli; cch={};"
PROMPT = "You are a coding agent."


def claude_code(cch: str, *, prompt: str = PROMPT, user: str = "hello") -> dict[str, Any]:
    return {
        "system": [{"type": "text", "text": BILLING.format(cch)}, {"type": "text", "text": prompt}],
        "messages": [{"role": "user", "content": user}],
    }


def repaired(
    dialect: Dialect, payload: dict[str, Any], *rules: Rule, pins: dict[Any, str] | None = None
) -> tuple[dict[str, Any], tuple[Repair, ...]]:
    payload = copy.deepcopy(payload)
    done = repair(
        dialect,
        payload,
        rules,
        None if pins is None else lambda rule, at, text: pins.setdefault((rule, at), text),
    )
    return payload, done


# -- Claude Code's line ----------------------------------------------------------------------------------


def test_the_billing_line_goes() -> None:
    one, done = repaired(MESSAGES, claude_code("0f3a2"), *ON)
    other, _ = repaired(MESSAGES, claude_code("91bc7"), *ON)
    assert one == other
    assert one["system"] == [{"type": "text", "text": PROMPT}]
    assert done == (Repair("claude-code-billing", 1),)


@pytest.mark.parametrize(
    ("dialect", "payload", "left"),
    [
        (MESSAGES, {"system": BILLING.format("a") + "\n\n" + PROMPT, "messages": []}, {"system": PROMPT}),
        (
            CHAT,
            {"messages": [{"role": "system", "content": BILLING.format("a") + "\n" + PROMPT}]},
            {"messages": [{"role": "system", "content": PROMPT}]},
        ),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "role": "developer",
                        "content": [{"type": "input_text", "text": BILLING + "\n" + PROMPT}],
                    }
                ]
            },
            {"input": [{"role": "developer", "content": [{"type": "input_text", "text": PROMPT}]}]},
        ),
        (RESPONSES, {"instructions": BILLING + "\n" + PROMPT, "input": "hi"}, {"instructions": PROMPT}),
    ],
)
def test_wherever_an_api_has_instructions(
    dialect: Dialect, payload: dict[str, Any], left: dict[str, Any]
) -> None:
    assert repaired(dialect, payload, *ON)[0] == {**payload, **left}


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param({"system": PROMPT, "messages": [{"role": "user", "content": BILLING}]}, id="user"),
        pytest.param({"system": f"Explain {BILLING}", "messages": []}, id="in-the-midst"),
        pytest.param(
            {"system": "x-anthropic-billing-header: is a header.\n", "messages": []}, id="another-text"
        ),
        pytest.param(
            {"system": PROMPT, "messages": [{"role": "assistant", "content": BILLING}]}, id="answer"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": BILLING}]}]},
            id="tool",
        ),
    ],
)
def test_the_same_words_with_a_meaning_stay(payload: dict[str, Any]) -> None:
    assert repaired(MESSAGES, payload, *ON) == (payload, ())


def test_where_the_line_is_kept_its_fingerprint_goes() -> None:
    after, done = repaired(MESSAGES, claude_code("0f3a2"), RULES["claude-code-version"])
    assert after["system"][0]["text"] == BILLING.format("0f3a2").replace(".2ef", "")
    assert done == (Repair("claude-code-version", 1),)
    plain = {"system": "cc_version=2.1.245.2ef; is what I run", "messages": []}
    assert repaired(MESSAGES, plain, RULES["claude-code-version"]) == (plain, ())


# -- rules that are off until a file names them --------------------------------------------------------------


def test_a_count_of_tokens_moves_to_the_end() -> None:
    payload = {
        "messages": [
            {"role": "user", "content": "<total_tokens>100 left</total_tokens>\nread a file"},
            {"role": "assistant", "content": "reading"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "<total_tokens>90 left</total_tokens>\ngo on"}],
            },
        ]
    }
    after, _ = repaired(MESSAGES, payload, RULES["total-tokens"])
    assert [message["content"] for message in after["messages"]] == [
        "read a file",
        "reading",
        [
            {"type": "text", "text": "go on"},
            {"type": "text", "text": "<total_tokens>90 left</total_tokens>"},
        ],
    ]


def test_nothing_moves_behind_an_answer_that_is_to_be_continued() -> None:
    payload = {
        "messages": [
            {"role": "user", "content": "<total_tokens>100 left</total_tokens> read"},
            {"role": "assistant", "content": "rea"},
        ]
    }
    assert repaired(MESSAGES, payload, RULES["total-tokens"]) == (payload, ())


def test_a_session_keeps_its_first_date() -> None:
    def turn(minute: int) -> dict[str, Any]:
        return {"system": f"It is 2026-11-29T10:{minute:02}:00Z, not 2020-01-01 00:00.", "messages": []}

    pins: dict[Any, str] = {}
    first, none = repaired(MESSAGES, turn(1), RULES["date-time"], pins=pins)
    second, done = repaired(MESSAGES, turn(2), RULES["date-time"], pins=pins)
    assert first == second == turn(1)
    assert (none, done) == ((), (Repair("date-time", 1),))
    assert repaired(MESSAGES, turn(2), RULES["date-time"]) == (turn(2), ()), "without a session"
    assert repaired(MESSAGES, turn(2), RULES["date-time"], pins={})[0] == turn(2), "another session"


@pytest.mark.parametrize("wrapped", [True, False])
def test_tools_are_sorted(wrapped: bool) -> None:
    def tools(*names: str) -> list[dict[str, Any]]:
        plain = [{"name": name, "input_schema": {"type": "object"}} for name in names]
        return [{"type": "function", "function": tool} for tool in plain] if wrapped else plain

    one, done = repaired(CHAT, {"tools": tools("b", "a")}, RULES["tool-order"])
    same, none = repaired(CHAT, one, RULES["tool-order"])
    assert one == same
    assert [tool.get("function", tool)["name"] for tool in one["tools"]] == ["a", "b"]
    assert (len(done), none) == (1, ())


SYSTEM_TEXT = "The build of 2026-11-29 10:30 failed; <total_tokens>5</total_tokens> is a tag."
TWINS: dict[str, list[tuple[Dialect, dict[str, Any]]]] = {
    "claude-code-billing": [
        (MESSAGES, {"system": f"Explain {BILLING}", "messages": [{"role": "user", "content": BILLING}]}),
    ],
    "claude-code-version": [
        (MESSAGES, {"system": f"Explain {BILLING}", "messages": [{"role": "user", "content": BILLING}]}),
        (MESSAGES, {"system": "x-anthropic-billing-header: cc_version=2.1.245; it has none", "messages": []}),
    ],
    "total-tokens": [
        (MESSAGES, {"system": SYSTEM_TEXT, "messages": [{"role": "user", "content": "hello"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "What does <total_tokens> mean?"}]}),
        (
            CHAT,
            {
                "messages": [
                    {"role": "assistant", "content": "<total_tokens>90 left</total_tokens>"},
                    {"role": "user", "content": "go on"},
                ]
            },
        ),
    ],
    "date-time": [
        (MESSAGES, {"system": PROMPT, "messages": [{"role": "user", "content": SYSTEM_TEXT}]}),
        (CHAT, {"messages": [{"role": "system", "content": "Version 2026-11 has 10:30 entries."}]}),
    ],
    "date": [
        (MESSAGES, {"system": PROMPT, "messages": [{"role": "user", "content": "since 2026-11-29?"}]}),
        (CHAT, {"messages": [{"role": "system", "content": "Ticket A2026-11-290 and 12026-11-29."}]}),
    ],
    "tool-order": [
        (CHAT, {"tools": [], "messages": [{"role": "user", "content": '[{"name": "b"}, {"name": "a"}]'}]}),
        (
            CHAT,
            {
                "tools": [{"name": "a", "parameters": {"enum": ["b", "a"]}}],
                "messages": [{"role": "assistant", "tool_calls": [{"id": "b"}, {"id": "a"}]}],
            },
        ),
    ],
}
"""Rule -> prompts with its words, or nearly, in a place or form in which they have a meaning."""


def test_each_rule_has_twins() -> None:
    assert TWINS.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("name", "dialect", "payload"), [(name, *twin) for name, twins in TWINS.items() for twin in twins]
)
def test_a_twin_with_a_meaning_stays(name: str, dialect: Dialect, payload: dict[str, Any]) -> None:
    pins: dict[Any, str] = {(name, at): "another" for at in range(9)}
    assert repaired(dialect, payload, RULES[name], pins=pins) == (payload, ())


# -- bodies that were not checked yet --------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"system": 3, "messages": "no"},
        {
            "system": [3, {"type": "text"}, {"type": "text", "text": 4}, None],
            "messages": [3, {}, {"role": 3}],
        },
        {"messages": [{"role": "system", "content": {"text": BILLING}}], "tools": "no"},
        {"messages": [{"role": "user", "content": None}], "tools": [3]},
    ],
)
@pytest.mark.parametrize("dialect", [MESSAGES, CHAT, RESPONSES], ids=repr)
def test_wrong_bodies_stay_for_the_checks(dialect: Dialect, payload: dict[str, Any]) -> None:
    assert repaired(dialect, payload, *RULES.values(), pins={}) == (payload, ())


def test_each_match_of_a_rule_is_pinned_by_its_place() -> None:
    rule = parse_rules(
        tomllib.loads('[[rule]]\nname = "n"\nwhere = "system"\nmatch = "n=\\\\d+"\naction = "pin"')
    ).rules[0]
    pins: dict[Any, str] = {}
    repaired(MESSAGES, {"system": "n=1 and n=2", "messages": []}, rule, pins=pins)
    after, _ = repaired(MESSAGES, {"system": "n=3 and n=4", "messages": []}, rule, pins=pins)
    assert after["system"] == "n=1 and n=2"
