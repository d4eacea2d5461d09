"""`admit` as a pure function: the decision for a given request, caller, model and flags."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from sglang_ext.router.api.chat import CHAT, INVOCATIONS
from sglang_ext.router.api.completions import COMPLETIONS
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.hints import HintAction
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.pooling import CLASSIFY, EMBEDDINGS, ENCODE, NATIVE_CLASSIFY, RERANK, SCORE
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.api.rewritten.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from sglang_ext.router.api.rewritten.vertex import VERTEX
from sglang_ext.router.clients.rules import SessionRow
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.http.types import Request, RequestRefused
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admit import admit, admit_hint
from sglang_ext.router.tenancy.admitted import Admitted, Rules
from sglang_ext.router.tenancy.tenants import ANYBODY, Caller

LIMITS = Limits(1000, 4096, served_name="tiny")
TENANT = Caller("a", 3, False, "kv-tenant-a")
SHARED = Caller("b", 3, False)
"""A tenant whose keys are not isolated."""
RULES = Rules()
TURNS: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
BODIES: dict[Dialect, dict[str, Any]] = {
    GENERATE: {"text": "hello"},
    CHAT: {"messages": TURNS},
    INVOCATIONS: {"messages": TURNS},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"model": "m", "max_tokens": 4, "messages": TURNS},
    EMBEDDINGS: {"input": "hello"},
    ENCODE: {"text": "hello"},
    CLASSIFY: {"input": "hello"},
    NATIVE_CLASSIFY: {"text": "hello"},
    SCORE: {"query": "hello", "items": ["a"]},
    RERANK: {"query": "hello", "documents": ["a"]},
    OLLAMA_CHAT: {"model": "m", "messages": TURNS},
    OLLAMA_GENERATE: {"model": "m", "prompt": "hello"},
    VERTEX: {"instances": [{"text": "hello"}]},
}
PASSED = [dialect for dialect in BODIES if dialect.admitted_as is None]
"""Dialects that workers are sent as they come."""
TELLS = {"return_cached_tokens_details": True}


def admitted(
    dialect: Dialect,
    caller: Caller = ANYBODY,
    rules: Rules = RULES,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> tuple[Admitted, dict[str, Any]]:
    """The decision, and the body that is sent to a worker."""
    payload = {**BODIES[dialect], **fields}
    target = dialect.path + "?x=1"
    request = Request("POST", dialect.path, target, headers or {}, orjson.dumps(payload))
    result = admit(dialect, payload, request, caller, LIMITS, rules, "new")
    return result, orjson.loads(result.sent.body)


def test_there_is_a_body_for_every_dialect() -> None:
    assert list(BODIES) == list(DIALECTS.values())


@pytest.mark.parametrize("dialect", PASSED, ids=repr)
@pytest.mark.parametrize("caller", [ANYBODY, TENANT, SHARED], ids=["anybody", "tenant", "shared"])
def test_what_is_sent(dialect: Dialect, caller: Caller) -> None:
    result, body = admitted(dialect, caller)
    chat = dialect is MESSAGES and caller.salt is not None
    expected = dict(BODIES[dialect])
    if dialect in (CHAT, INVOCATIONS, COMPLETIONS) or chat:
        expected |= TELLS
    if caller.salt is not None and dialect.takes_salt:  # else it travels as a header
        expected["cache_salt"] = caller.salt
    assert body == expected
    assert (result.sent.translation is not None) == chat
    assert result.sent.target == (CHAT.path if chat else dialect.path + "?x=1")
    assert (result.dialect, result.sent.dialect) == (dialect, CHAT if chat else dialect)
    assert [prompt.namespace[2] for prompt in result.job.prompts] == [caller.salt]
    assert result.tells_cached == ("return_cached_tokens_details" in body)
    name = "" if result.job.batch else "new"
    assert (result.rid, result.rids, result.session, result.hints) == (name, (), None, ())


@pytest.mark.parametrize("dialect", PASSED, ids=repr)
def test_a_body_with_nothing_to_change_is_sent_as_it_came(dialect: Dialect) -> None:
    payload = BODIES[dialect]
    request = Request("POST", dialect.path, dialect.path, {}, orjson.dumps(payload))
    result = admit(dialect, payload, request, ANYBODY, LIMITS, Rules(cache_details=False), "new")
    assert result.sent.body is request.body
    assert not result.tells_cached


@pytest.mark.parametrize("dialect", [OLLAMA_CHAT, OLLAMA_GENERATE, VERTEX], ids=repr)
@pytest.mark.parametrize("caller", [ANYBODY, TENANT, SHARED], ids=["anybody", "tenant", "shared"])
def test_a_rewritten_request_is_admitted_as_the_other_dialect_s(dialect: Dialect, caller: Caller) -> None:
    other = dialect.admitted_as
    assert other is not None
    result, body = admitted(
        dialect,
        caller,
        Rules(sessions=(SessionRow(field=("user",)),)),
        user="u",
        rid="r",
        priority=2,
        extra_key="k",
        newer="x",
    )
    text = body.get("text", body.get("messages"))
    assert text in ("hello", ["hello"], TURNS)
    assert result.sent.target == other.path
    assert (result.dialect, result.sent.dialect) == (dialect, other)
    assert result.sent.translation is not None
    assert body.get("cache_salt") == caller.salt
    assert (body["rid"], body["extra_key"]) == (caller.scope + "r", "k")
    assert {"newer", "user"}.isdisjoint(body)
    assert [prompt.namespace for prompt in result.job.prompts] == [(None, "k", caller.salt)]
    assert (result.priority, result.session) == (2, caller.scope + "u")


@pytest.mark.parametrize("asked", [True, False])
def test_the_client_s_own_word_on_cached_tokens_stands(asked: bool) -> None:
    result, body = admitted(CHAT, return_cached_tokens_details=asked)
    assert body["return_cached_tokens_details"] is asked
    assert result.tells_cached is asked
    assert not result.hides_usage
    assert admitted(CHAT)[0].hides_usage


def test_a_stream_through_chat_asks_for_its_usage() -> None:
    _, body = admitted(MESSAGES, TENANT, stream=True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "stream_options" not in admitted(MESSAGES, stream=True)[1]


@pytest.mark.parametrize("in_place", [True, False])
def test_system_messages_go_through_chat_where_the_model_sees_them(in_place: bool) -> None:
    """SGLang's chat leaves them in place, and the template decides their use."""
    system = {"role": "system", "content": "be brief"}
    payload = {**BODIES[MESSAGES], "messages": [*TURNS, system]}
    request = Request("POST", MESSAGES.path, MESSAGES.path, {}, orjson.dumps(payload))
    seen = [*TURNS, system] if in_place else [system, *TURNS]
    result = admit(MESSAGES, payload, request, TENANT, LIMITS, RULES, "new", in_place)
    assert orjson.loads(result.sent.body)["messages"] == seen
    plain = admit(MESSAGES, payload, request, ANYBODY, LIMITS, RULES, "new", in_place)
    assert orjson.loads(plain.sent.body)["messages"] == payload["messages"]
    flight = Flight(plain, [], request, None, Record("r", "POST", MESSAGES.path, 0.0), plain.sent, 0)
    flight.take_fields()
    assert orjson.loads(flight.sent.body)["messages"] == seen


def test_names_that_servers_look_up_are_the_tenant_s_own() -> None:
    result, body = admitted(GENERATE, TENANT, rid="r", session_id="s")
    assert result.rids == ("r",)
    assert (body["rid"], body["session_id"]) == (TENANT.scope + "r", TENANT.scope + "s")
    assert result.rid == TENANT.scope + "r"
    assert admitted(GENERATE, rid="r")[0].rid == "r"
    assert admitted(GENERATE, text=["a", "b"])[0].rid == "", "a batch has no one name"
    assert admitted(CHAT, n=2)[0].rid == ""


def test_a_session_is_the_tenant_s_own() -> None:
    rules = Rules(sessions=(SessionRow(header="x-session-id"),))
    headers = {"x-session-id": "s"}
    assert admitted(CHAT, ANYBODY, rules, headers)[0].session == "s"
    assert admitted(CHAT, TENANT, rules, headers)[0].session == TENANT.scope + "s"


def test_priority_is_kept_and_unknown_fields_are_dropped() -> None:
    assert admitted(CHAT, TENANT)[0].priority == 3
    assert admitted(CHAT, TENANT, priority=1)[0].priority == 1
    result, body = admitted(
        CHAT,
        newer="x",
        kv_hints={"actions": [{"action_type": "prefetch", "payload": {"session": "s"}}]},
    )
    assert "newer" not in body
    assert "kv_hints" not in body
    assert result.hints == (HintAction("0", {"session": "s"}),)


@pytest.mark.parametrize(("model", "sent"), [("default", "tiny"), ("default:lora", "tiny:lora"), ("m", "m")])
def test_the_default_model_has_a_name_for_responses(model: str, sent: str) -> None:
    assert admitted(RESPONSES, model=model)[1]["model"] == sent
    assert admitted(CHAT, model=model)[1]["model"] == model


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"cache_salt": "x"}, "cache_salt"), ({"priority": 4}, "priority"), ({"rid": 7}, "rid")],
)
def test_what_a_tenant_may_not_say_is_refused(dialect: Dialect, fields: dict[str, Any], param: str) -> None:
    caller = TENANT if dialect.takes_salt else SHARED
    with pytest.raises(RequestRefused) as refused:
        admitted(dialect, caller, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_hint_is_held_to_the_same() -> None:
    result = admit_hint({"messages": TURNS, "priority": 2}, TENANT, LIMITS)
    assert result.priority == 2
    assert result.advisory.job is not None
    assert result.advisory.job.prompts[0].namespace[2] == TENANT.salt
    warm = admit_hint({**BODIES[CHAT], "prompt_cache_options": {"prewarm": True}}, TENANT, LIMITS, CHAT)
    assert warm.advisory.job is not None
    assert warm.advisory.job.prompts[0].namespace[2] == TENANT.salt
    for dialect in (None, CHAT):
        with pytest.raises(RequestRefused, match="cache_salt"):
            admit_hint({**BODIES[CHAT], "cache_salt": "x"}, TENANT, LIMITS, dialect)
