"""Valid hints, and the errors of invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.hints import advisory_of, agent_priority, hint_actions, parse_advisory
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.clients.divergence import Turn
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.telemetry.fetch_note import FetchNote
from sglang_ext.router.telemetry.record import BY_FETCH, Record
from sglang_ext.router.tenancy.bounded import ENTRY_BYTES, size_of

LIMITS = Limits(vocab_size=1000, context_length=4096)
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": TURNS}, "chat"),
        ({"messages": TURNS, "session": "s"}, "chat"),
        ({"text": "Once upon a time"}, "text"),
        ({"prompt": "Once upon a time", "model": "m"}, "text"),
        ({"input_ids": [1, 2, 3]}, "ids"),
    ],
)
def test_a_hint_carries_the_conversation_in_any_form(body: dict[str, Any], field: str) -> None:
    advisory = parse_advisory(body, LIMITS)
    assert advisory.job is not None
    (prompt,) = advisory.job.prompts
    assert getattr(prompt, field) is not None
    assert advisory.session == body.get("session")


def test_a_hint_may_name_its_session_only() -> None:
    advisory = parse_advisory({"session": "s", "earliest_s": 2, "ttl_s": 30.5}, LIMITS)
    assert (advisory.job, advisory.session) == (None, "s")
    assert (advisory.earliest_s, advisory.ttl_s) == (2.0, 30.5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "session"),
        ({"session": ""}, "session"),
        ({"session": 3}, "session"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"input_ids": [1, 1000]}, "input_ids[1]"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"text": ["a", "b"]}, "text"),
        ({"session": "s", "ttl_s": -1}, "ttl_s"),
        ({"session": "s", "ttl_s": "long"}, "ttl_s"),
        ({"session": "s", "ttl_s": True}, "ttl_s"),
        ({"session": "s", "earliest_s": float("nan")}, "earliest_s"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_advisory(body, LIMITS)
    assert refused.value.status == 400
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("dialect", "body", "is_hint"),
    [
        (CHAT, {"prompt_cache_options": {"prewarm": True}}, True),
        (RESPONSES, {"prompt_cache_options": {"prewarm": True, "ttl": "30m"}}, True),
        (CHAT, {"prompt_cache_options": {"prewarm": False}}, False),
        (CHAT, {"prompt_cache_options": {"prewarm": "yes"}}, False),
        (CHAT, {"prompt_cache_options": {"ttl": "30m"}}, False),
        (CHAT, {"prompt_cache_options": [True]}, False),
        (CHAT, {"max_tokens": 0}, False),
        (MESSAGES, {"max_tokens": 0}, True),
        (MESSAGES, {"max_tokens": 1}, False),
        (MESSAGES, {"max_tokens": False}, False),
        (MESSAGES, {}, False),
    ],
)
def test_which_requests_only_warm_the_cache(dialect: Dialect, body: dict[str, Any], is_hint: bool) -> None:
    assert dialect.only_warms(body) is is_hint


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [(None, None), (90, 90.0), (1.5, 1.5), ("45s", 45.0), ("30m", 1800.0), ("24h", 86400.0), ("7", 7.0)],
)
def test_the_time_to_live_of_a_prewarm(ttl: Any, seconds: float | None) -> None:
    body = {"messages": TURNS, "prompt_cache_options": {"prewarm": True, "ttl": ttl}}
    advisory = advisory_of(CHAT, body, LIMITS)
    assert advisory.ttl_s == seconds
    assert advisory.job is not None


@pytest.mark.parametrize("ttl", ["soon", -1, True, float("inf"), [], "1d"])
def test_a_wrong_time_to_live_is_refused(ttl: Any) -> None:
    body = {"messages": TURNS, "prompt_cache_options": {"prewarm": True, "ttl": ttl}}
    with pytest.raises(RequestRefused) as refused:
        advisory_of(CHAT, body, LIMITS)
    assert refused.value.param == "prompt_cache_options.ttl"


def test_anthropics_way() -> None:
    body = {"model": "m", "max_tokens": 0, "messages": TURNS[:1], "system": "Be brief."}
    advisory = advisory_of(MESSAGES, body, LIMITS)
    assert advisory.job is not None
    assert advisory.job.prompts[0].chat is not None


@pytest.mark.parametrize(
    ("envelope", "payloads"),
    [
        ({"actions": [{"action_type": "prefetch", "payload": {"session": "s"}}]}, [{"session": "s"}]),
        ({"actions": [{"action_type": "pin", "payload": {"session": "s"}}]}, []),
        ({"actions": [{"action_type": "prefetch", "payload": "s"}, 3]}, []),
        ({"actions": "prefetch"}, []),
        ({}, []),
        ([], []),
        (None, []),
    ],
)
def test_prefetch_actions_of_an_envelope(envelope: Any, payloads: list[Any]) -> None:
    taken = [action.body for action in hint_actions({"kv_hints": envelope}) if action.body is not None]
    assert taken == payloads
    assert list(hint_actions({})) == []


def test_actions_are_answered_by_their_ids() -> None:
    actions = [
        {"action_id": "a-1", "action_type": "prefetch", "payload": {"session": "s"}},
        {
            "action_id": "kv",
            "action_type": "kv.fetch",
            "action_version": "1.0",
            "payload": {"block_hashes": [1]},
        },
        {"action_id": "x\r\ny: z", "action_type": "prefetch", "payload": {}},
        3,
        {"action_id": "a" * 65},
    ]
    found = [
        (action.id, action.body is not None) for action in hint_actions({"kv_hints": {"actions": actions}})
    ]
    assert found == [("a-1", True), ("kv", False), ("2", True), ("4", False)]


SOURCE = {"source_control_endpoint": "tcp://host-a:25000", "block_hashes": [1, -(2**63)]}


@pytest.mark.parametrize(
    ("changed", "fetches"),
    [
        ({}, True),
        ({"action_version": "2.0"}, False),
        ({"action_type": "kv.drop"}, False),
        ({"payload": {**SOURCE, "block_hashes": ["1"]}}, False),
        ({"payload": {"block_hashes": [1]}}, False),
        ({"payload": None}, False),
    ],
)
def test_dynamo_s_fetch_asks_for_the_request_s_own_kv(changed: dict[str, Any], fetches: bool) -> None:
    action = {"action_id": "f", "action_type": "kv.fetch", "action_version": "1.0", "payload": SOURCE}
    (found,) = hint_actions({"kv_hints": {"actions": [action | changed]}})
    assert (found.fetches, found.body) == (fetches, None)


@pytest.mark.parametrize(
    ("end", "matched", "said"),
    [
        ("done", 0, "completed"),
        ("under-way", 0, "accepted"),
        ("not-worth-it", 0, "rejected"),
        ("unreachable", 0, "rejected"),
        (None, 640, "completed"),
        (None, 0, "rejected"),
    ],
)
def test_a_fetch_is_answered_by_what_became_of_it(end: str | None, matched: int, said: str) -> None:
    record = Record("r", "POST", "/generate", 0.0)
    record.matched_tokens = matched
    if end is not None:
        record.fetch = FetchNote("a", [], 0.0, 0.0, False, end)
    record.hints = {"p": "deferred;id=1", "f": BY_FETCH}
    assert record.hint_answers() == f"p=deferred;id=1, f={said};source=router"


@pytest.mark.parametrize(
    ("extension", "priority"),
    [
        ({"agent_hints": {"priority": 5, "osl": 100, "speculative_prefill": True}}, 5),
        ({"agent_hints": {"priority": -1}}, -1),
        ({"agent_hints": {"priority": True}}, None),
        ({"agent_hints": {"priority": "5"}}, None),
        ({"agent_hints": {"priority": 1 << 40}}, None),
        ({"agent_hints": [5]}, None),
        ({}, None),
        (5, None),
    ],
)
def test_dynamo_s_priority(extension: Any, priority: int | None) -> None:
    assert agent_priority({"nvext": extension}) == priority


# -- the last prompt of a session ---------------------------------------------------------------------

SPACE = ("tokens", None, None, None)


def test_a_session_is_known_by_what_it_sent_last() -> None:
    memory = SessionMemory(10_000)
    memory.learn("s", SPACE, Turn(b"one0", 1))
    memory.learn("s", SPACE, Turn(b"one0two0", 2))
    assert memory.find("s") == (SPACE, b"one0two0")
    assert memory.find("other") is None
    memory.forget("s")
    assert (memory.find("s"), memory.size_bytes, len(memory)) == (None, 0, 0)


def test_who_was_not_seen_for_longest_is_forgotten_first() -> None:
    each = ENTRY_BYTES + size_of("a", *SPACE, b"1234")
    memory = SessionMemory(3 * each)
    for name in "abc":
        memory.learn(name, SPACE, Turn(b"1234", 1))
    memory.find("a")
    memory.learn("d", SPACE, Turn(b"1234", 1))
    assert memory.find("b") is None
    assert all(memory.find(name) for name in "acd")
    assert memory.size_bytes == 3 * each


def test_what_alone_exceeds_the_memory_is_not_kept() -> None:
    memory = SessionMemory(100)
    memory.learn("s", SPACE, Turn(bytes(1000), 250))
    assert (memory.find("s"), memory.size_bytes) == (None, 0)
