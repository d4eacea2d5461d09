"""`admit` as a pure function: what is decided of a request, its caller, the model and the flags given."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from sglang_ext.router.api.usage import Form
from sglang_ext.router.api.validation import Endpoint, Limits
from sglang_ext.router.http.types import Request, RequestRefused
from sglang_ext.router.tenancy.admit import Admitted, Rules, admit, admit_hint
from sglang_ext.router.tenancy.tenants import ANYBODY, Caller

LIMITS = Limits(1000, 4096, served_name="tiny")
TENANT = Caller("a", 3, False, "kv-tenant-a")
SHARED = Caller("b", 3, False)
"""A tenant whose keys are not isolated."""
RULES = Rules()
MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.GENERATE: {"text": "hello"},
    Endpoint.CHAT: {"messages": MESSAGES},
    Endpoint.COMPLETIONS: {"prompt": "hello"},
    Endpoint.RESPONSES: {"input": "hello"},
    Endpoint.MESSAGES: {"model": "m", "max_tokens": 4, "messages": MESSAGES},
}
TELLS = {"return_cached_tokens_details": True}


def admitted(
    endpoint: Endpoint,
    caller: Caller = ANYBODY,
    rules: Rules = RULES,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> tuple[Admitted, dict[str, Any]]:
    """What is decided, and the body that a worker is sent."""
    payload = {**BODIES[endpoint], **fields}
    target = endpoint.value + "?x=1"
    request = Request("POST", endpoint.value, target, headers or {}, orjson.dumps(payload))
    result = admit(endpoint, payload, request, caller, LIMITS, rules, "new")
    return result, orjson.loads(result.sent.body)


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("caller", [ANYBODY, TENANT, SHARED], ids=["anybody", "tenant", "shared"])
def test_what_is_sent(endpoint: Endpoint, caller: Caller) -> None:
    result, body = admitted(endpoint, caller)
    chat = endpoint is Endpoint.MESSAGES and caller.salt is not None
    expected = dict(BODIES[endpoint])
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS) or chat:
        expected |= TELLS
    if caller.salt is not None:
        expected["cache_salt"] = caller.salt
    assert body == expected
    assert result.sent.message_model == ("m" if chat else None)
    assert result.sent.target == (Endpoint.CHAT.value if chat else endpoint.value + "?x=1")
    assert (result.sent.form is Form.OPENAI) == (chat or endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS))
    assert [prompt.namespace[2] for prompt in result.job.prompts] == [caller.salt]
    assert result.tells_cached == ("return_cached_tokens_details" in body)
    assert (result.rid, result.rids, result.session, result.hints) == ("new", (), None, ())


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_body_with_nothing_to_change_is_sent_as_it_came(endpoint: Endpoint) -> None:
    payload = BODIES[endpoint]
    request = Request("POST", endpoint.value, endpoint.value, {}, orjson.dumps(payload))
    result = admit(endpoint, payload, request, ANYBODY, LIMITS, Rules(cache_details=False), "new")
    assert result.sent.body is request.body
    assert not result.tells_cached


@pytest.mark.parametrize("asked", [True, False])
def test_the_client_s_own_word_on_cached_tokens_stands(asked: bool) -> None:
    result, body = admitted(Endpoint.CHAT, return_cached_tokens_details=asked)
    assert body["return_cached_tokens_details"] is asked
    assert result.tells_cached is asked
    assert not result.hides_usage
    assert admitted(Endpoint.CHAT)[0].hides_usage


def test_a_stream_through_chat_asks_for_its_usage() -> None:
    _, body = admitted(Endpoint.MESSAGES, TENANT, stream=True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "stream_options" not in admitted(Endpoint.MESSAGES, stream=True)[1]


def test_names_that_servers_look_up_are_the_tenant_s_own() -> None:
    result, body = admitted(Endpoint.GENERATE, TENANT, rid="r", session_id="s")
    assert result.rids == ("r",)
    assert (body["rid"], body["session_id"]) == (TENANT.scope + "r", TENANT.scope + "s")
    assert result.rid == TENANT.scope + "r"
    assert admitted(Endpoint.GENERATE, rid="r")[0].rid == "r"
    assert admitted(Endpoint.GENERATE, text=["a", "b"])[0].rid == "", "a batch has no one name"
    assert admitted(Endpoint.CHAT, n=2)[0].rid == ""


def test_a_session_is_the_tenant_s_own() -> None:
    rules = Rules(session_header="x-session-id")
    headers = {"x-session-id": "s"}
    assert admitted(Endpoint.CHAT, ANYBODY, rules, headers)[0].session == "s"
    assert admitted(Endpoint.CHAT, TENANT, rules, headers)[0].session == TENANT.scope + "s"


def test_priority_and_what_nobody_has_judged() -> None:
    assert admitted(Endpoint.CHAT, TENANT)[0].priority == 3
    assert admitted(Endpoint.CHAT, TENANT, priority=1)[0].priority == 1
    result, body = admitted(
        Endpoint.CHAT,
        newer="x",
        kv_hints={"actions": [{"action_type": "prefetch", "payload": {"session": "s"}}]},
    )
    assert "newer" not in body
    assert "kv_hints" not in body
    assert result.hints == ({"session": "s"},)


@pytest.mark.parametrize(("model", "sent"), [("default", "tiny"), ("default:lora", "tiny:lora"), ("m", "m")])
def test_the_default_model_has_a_name_for_responses(model: str, sent: str) -> None:
    assert admitted(Endpoint.RESPONSES, model=model)[1]["model"] == sent
    assert admitted(Endpoint.CHAT, model=model)[1]["model"] == model


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"cache_salt": "x"}, "cache_salt"), ({"priority": 4}, "priority"), ({"rid": 7}, "rid")],
)
def test_what_a_tenant_may_not_say_is_refused(endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        admitted(endpoint, TENANT, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_hint_is_held_to_the_same() -> None:
    result = admit_hint({"messages": MESSAGES, "priority": 2}, TENANT, LIMITS)
    assert result.priority == 2
    assert result.advisory.job is not None
    assert result.advisory.job.prompts[0].namespace[2] == TENANT.salt
    warm = admit_hint(
        {**BODIES[Endpoint.CHAT], "prompt_cache_options": {"prewarm": True}}, TENANT, LIMITS, Endpoint.CHAT
    )
    assert warm.advisory.job is not None
    assert warm.advisory.job.prompts[0].namespace[2] == TENANT.salt
    for endpoint in (None, Endpoint.CHAT):
        with pytest.raises(RequestRefused, match="cache_salt"):
            admit_hint({**BODIES[Endpoint.CHAT], "cache_salt": "x"}, TENANT, LIMITS, endpoint)
