"""The router's tables of request fields judge every field that this SGLang takes, and no other."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from array import array
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from sglang_ext.patches.versions import installed_sglang_version
from sglang_ext.router.api.chat import CHAT, INVOCATIONS
from sglang_ext.router.api.completions import COMPLETIONS
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.documents import MESSAGE_FIELDS, PART_FIELDS
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.messages_as_chat import to_chat
from sglang_ext.router.api.pooling import CLASSIFY, EMBEDDINGS, ENCODE, NATIVE_CLASSIFY, RERANK, SCORE
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.api.rewritten.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from sglang_ext.router.api.rewritten.vertex import VERTEX
from sglang_ext.router.fleet.facts import ChatFacts
from sglang_ext.router.fleet.worker import _TOOLS_AS_GIVEN
from sglang_ext.router.tenancy.request_fields import (
    FIELDS,
    MEDIA,
    MEDIA_KEYS,
    SAMPLING,
    Who,
    forbidden,
    unjudged,
)
from sglang_ext.router.tokens.chat_template import is_glm53, prepare, shows_system_in_place, unsupported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.ollama import protocol as ollama
    from sglang.srt.entrypoints.openai import protocol as openai
    from sglang.srt.managers import io_struct
    from sglang.srt.parser import template_detection
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.utils import common

BODIES: dict[Dialect, Any] = {
    GENERATE: io_struct.GenerateReqInput,
    CHAT: openai.ChatCompletionRequest,
    INVOCATIONS: openai.ChatCompletionRequest,
    COMPLETIONS: openai.CompletionRequest,
    RESPONSES: openai.ResponsesRequest,
    MESSAGES: anthropic.AnthropicMessagesRequest,
    EMBEDDINGS: openai.EmbeddingRequest,
    ENCODE: io_struct.EmbeddingReqInput,
    CLASSIFY: openai.ClassifyRequest,
    NATIVE_CLASSIFY: io_struct.EmbeddingReqInput,
    SCORE: openai.ScoringRequest,
    RERANK: openai.V1RerankReqInput,
}
"""SGLang's class for the body of each API."""

REWRITTEN: dict[Dialect, Any] = {
    OLLAMA_CHAT: ollama.OllamaChatRequest,
    OLLAMA_GENERATE: ollama.OllamaGenerateRequest,
    VERTEX: io_struct.VertexGenerateReqInput,
}
"""The same of bodies that reach workers as those of another API."""

LATER = {
    *("mm_processor_kwargs", "watermark", "return_flat_raw_output_top_logprobs", "max_long_side_pixel"),
    "decision_layout",
}
"""Fields that only some supported versions of SGLang accept; the other versions ignore or refuse them."""


def fields_of(kind: Any) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    names: set[str] = set(getattr(kind, "model_fields", None) or kind.__struct_fields__)
    return names


def media() -> Iterator[Any]:
    """Classes of the objects of images, videos and sounds."""
    yield from (common.ImageData, common.VideoData)
    for name, kind in vars(openai).items():
        if inspect.isclass(kind) and name.startswith("ChatCompletionMessageContent"):
            fields = getattr(kind, "model_fields", {})
            if "url" in fields or "data" in fields:
                yield kind


def test_every_endpoint_is_judged() -> None:
    assert [*BODIES, *REWRITTEN] == list(DIALECTS.values())
    assert all(dialect.admitted_as is None for dialect in BODIES)


@pytest.mark.parametrize("dialect", REWRITTEN, ids=repr)
def test_every_field_of_a_rewritten_body_is_known(dialect: Dialect) -> None:
    """A new field must go into the other API's body, or be listed as a field that SGLang ignores."""
    notes = {"rid", "http_worker_ipc"} & fields_of(REWRITTEN[dialect])
    assert fields_of(REWRITTEN[dialect]) - set(FIELDS) - notes == dialect.own_fields


@pytest.mark.parametrize("dialect", BODIES, ids=repr)
def test_every_field_of_a_body_is_judged(dialect: Dialect) -> None:
    """A new field reaches no server until its permission is defined: in `tenancy/request_fields.py`, or,
    where only this API has it, with the API."""
    assert fields_of(BODIES[dialect]) - set(FIELDS) - dialect.own_fields == set()


def test_what_an_api_calls_its_own_no_other_has() -> None:
    for dialect, body in BODIES.items():
        others = set().union(*(fields_of(kind) for kind in BODIES.values() if kind is not body))
        assert dialect.own_fields <= fields_of(body) - others - set(FIELDS)


def test_every_sampling_parameter_is_judged() -> None:
    assert fields_of(SamplingParams) | LATER >= set(SAMPLING) >= fields_of(SamplingParams)


def test_every_field_of_an_image_is_judged() -> None:
    kinds = list(media())
    assert len(kinds) >= 6
    found = set().union(*map(fields_of, kinds))
    assert found | LATER >= set(MEDIA) >= found


def test_every_part_that_holds_media_is_looked_into() -> None:
    holders = {
        name
        for kind in vars(openai).values()
        if inspect.isclass(kind) and kind.__name__.startswith("ChatCompletionMessageContent")
        for name, field in getattr(kind, "model_fields", {}).items()
        if any(media_kind.__name__ in str(field.annotation) for media_kind in media())
    }
    assert holders == set(MEDIA_KEYS)


def test_nothing_is_judged_that_does_not_exist() -> None:
    # "reasoning" is no own field of responses: it is read from a chat's body too, before that is taken apart.
    own = set().union(*(dialect.own_fields for dialect in BODIES))
    found = set().union(*map(fields_of, BODIES.values()))
    assert found | LATER >= set(FIELDS) | own >= found


def test_a_message_s_fields_become_those_of_a_chat() -> None:
    """Anthropic's messages are sent on as chats where they need a salt: from known fields only."""
    payload = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "mm_hashes": ["a"],
        "lora_id": "b",
        "cache_salt": "c",
    }
    assert set(to_chat(payload)) == {"model", "messages"}


SAYS_ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
REFUSES = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('no') }}{% endfor %}"


@pytest.mark.parametrize("template", [SAYS_ALL, REFUSES + SAYS_ALL, "{{ messages[0].content }}", "{%"])
def test_whether_a_template_shows_system_messages_in_place_is_found_as_sglang_does(template: str) -> None:
    assert shows_system_in_place(template) == template_detection.detect_inline_system_support(template)


GLM53 = "[gMASK]<sop>Reasoning Effort: max <tool_call><arg_key><arg_value>"


@pytest.mark.parametrize("template", [GLM53, GLM53 + "{{ enable_thinking }}", GLM53[3:], SAYS_ALL])
def test_a_template_that_sglang_renders_in_python_is_named(template: str) -> None:
    if theirs := getattr(template_detection, "is_glm53_template", None):  # from 0.5.23 on
        assert theirs(template) == is_glm53(template)
    reason = unsupported(ChatFacts(), "GlmMoeDsaForCausalLM", template)
    assert (reason == "the server renders GLM-5.3's chat template in Python") == (template is GLM53)
    assert unsupported(ChatFacts(), "LlamaForCausalLM", template) is None


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
TOOLS = [{"type": "tool_reference", "tool_name": "tides"}, {"type": "tool_reference", "tool_name": "moon"}]
RESULT = {
    "type": "tool_result",
    "tool_use_id": "t1",
    "content": [text("rain"), text("wind"), *TOOLS, text(""), text("sun")],
}
INLINE = {
    "model": "m",
    "max_tokens": 5,
    "system": [text(" one "), text("two")],
    "messages": [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "system", "content": "  be brief "},
        {"role": "assistant", "content": [text("let me see"), CALL]},
        {"role": "user", "content": [text("before"), RESULT, text("after")]},
        {"role": "system", "content": [text(" c"), text("  "), text("d ")]},
        {"role": "system", "content": []},
        {"role": "assistant", "content": []},
        {"role": "user", "content": "x"},
    ],
}


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("system", [INLINE["system"], "  one", " ", None])
def test_a_message_s_conversation_is_the_one_that_sglang_makes_of_it(system: Any, in_front: bool) -> None:
    serving = object.__new__(AnthropicServing)
    serving._merge_inline_system = in_front
    body = {**INLINE, "system": system}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = serving._convert_to_chat_completion_request(anthropic.AnthropicMessagesRequest(**body))
    ours = openai.ChatCompletionRequest(**to_chat(body, in_front=in_front))
    for chat in (theirs, ours):
        for message in chat.messages:
            for call in getattr(message, "tool_calls", None) or ():
                call.function.arguments = json.loads(call.function.arguments)
    assert [each.model_dump() for each in ours.messages] == [each.model_dump() for each in theirs.messages]
    twin = openai.ChatCompletionRequest(**to_chat(body, in_front=not in_front))
    assert len(twin.messages) != len(theirs.messages)


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}, {"strict": None}])
def test_tools_reach_the_template_as_sglang_has_them(strict: dict[str, Any]) -> None:
    """Key by key in their order, as templates print them."""
    version = tuple(map(int, installed_sglang_version().split(".")[:3]))
    given = {"name": "weather", "parameters": {"type": "object"}, "of_nobody": 1, **strict}
    tool = {"type": "function", "function": given}
    chat = ChatFacts(tools_as_given=version >= _TOOLS_AS_GIVEN)
    payload = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    (ours,) = prepare(payload, chat, "string").tools or ()
    if strict.get("strict", False) is None and not chat.tools_as_given:
        return  # it refuses such a tool
    assert json.dumps(ours) == json.dumps(openai.Tool(**tool).model_dump())
    (twin,) = prepare(payload, ChatFacts(tools_as_given=not chat.tools_as_given), "string").tools or ()
    assert twin != ours or json.dumps(twin) != json.dumps(ours)


def test_the_twin_with_a_new_field_is_seen() -> None:
    newer = dataclasses.make_dataclass("newer", ["text", "names_content_by_hash"])
    assert fields_of(newer) - set(FIELDS) == {"names_content_by_hash"}
    payload = {"text": "x", "names_content_by_hash": "y"}
    assert unjudged(payload, GENERATE, tenant=False, trusted=frozenset()) == ["names_content_by_hash"]


def test_documents_keep_what_sglang_reads_of_a_message() -> None:
    """A field of a newer version is to be kept in documents, too (``api/documents.py``)."""
    messages = (openai.ChatCompletionMessageGenericParam, openai.ChatCompletionMessageUserParam)
    assert set().union(*map(fields_of, messages)) <= MESSAGE_FIELDS
    parts = [
        kind
        for name, kind in vars(openai).items()
        if inspect.isclass(kind)
        and name.startswith("ChatCompletionMessageContent")
        and "type" in getattr(kind, "model_fields", {})
    ]
    assert len(parts) > 5
    assert set().union(*map(fields_of, parts)) <= PART_FIELDS


@pytest.mark.parametrize("dialect", BODIES, ids=repr)
def test_fields_that_sglang_writes_are_refused_from_clients(dialect: Dialect) -> None:
    for name in fields_of(BODIES[dialect]):
        if FIELDS.get(name) is Who.NOBODY:
            for tenant in (False, True):
                found = list(forbidden({name: 1}, dialect, tenant=tenant, trusted=frozenset({name})))
                assert [field for field, _ in found] == [name]


def test_no_special_name_stands_for_an_adapter() -> None:
    """SGLang appends an adapter's id to the ``extra_key``, so a key that ends in one names the same KV."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.schedule_batch import Req

    id = LoRARef.deterministic_id("a", "/adapters/a")
    for fields in ({"extra_key": id}, {"extra_key": "mine" + id}, {"extra_key": ["mine", id]}):
        ((field, why),) = forbidden(fields, GENERATE, tenant=False, trusted=frozenset())
        assert (field, "LoRA adapter" in why) == ("extra_key", True)
    # The twin: SGLang would confuse the two requests whose fields are refused.
    plain = SamplingParams(max_new_tokens=1)
    adapted, base = (
        Req("1", "", array("q", [1]), plain, lora_id=id, extra_key="mine"),
        Req("2", "", array("q", [1]), plain, extra_key="mine" + id),
    )
    assert adapted.extra_key == base.extra_key
    for key in (None, "mine", uuid4().hex, id + "x", ["mine", None], id[:-1]):
        assert not list(forbidden({"extra_key": key}, GENERATE, tenant=False, trusted=frozenset()))
