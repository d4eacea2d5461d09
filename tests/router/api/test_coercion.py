"""The router takes a value of another type where a server does, and as the same value: "8" for 8.

The oracle is pydantic with the field types of the installed SGLang's own request classes.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.completions import COMPLETIONS
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.messages import _BODY as MESSAGES
from sglang_ext.router.api.responses import _BODY as RESPONSES
from sglang_ext.router.api.validation import (
    SAMPLING,
    check_fields,
    coerced_bool,
    coerced_int,
    coerced_number,
)
from sglang_ext.router.http.types import RequestRefused

LIMITS = Limits(vocab_size=1 << 31, context_length=1 << 20)
VALUES: tuple[Any, ...] = (
    "8", " 8 ", "+8", "08", "1_000", "1__0", "8.0", "8.5", "8.", ".5", "1e3", "0x10", "", "٣", "nan", "inf",
    "1e400", 8.0, 8.5, 1e20, 1e300, True, False, 0, 1, 2, 0.0, 1.0, -0.0, "yes", "ON", "t", " true", "TRUE",
    "1.0", "maybe", [], [1], {}, {"a": 1}, "9" * 30,
)  # fmt: skip
JSON = st.one_of(
    st.sampled_from(VALUES),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    # pydantic also takes unintended spellings, such as "0-1" for -1 and "0__9" for 9.
    st.from_regex(r"[ \t\n]?[+-]?[1-9][0-9]{0,5}(\.[0-9]{0,3})?([eE]-?[0-9])?[ \t\n]?", fullmatch=True),
    st.from_regex(r"[+-]?[1-9][0-9]{0,2}(_[0-9]{3}){0,2}", fullmatch=True),
    st.text(st.characters(categories=["L", "P", "S"], exclude_characters="_+-."), max_size=5),
)
REFUSED = object()


def taken(adapter: TypeAdapter[Any], value: Any) -> Any:
    """The value that a server reads; infinities and NaN count as refused, since the server refuses them
    later."""
    try:
        found = adapter.validate_python(value)
    except ValidationError:
        return REFUSED
    return REFUSED if isinstance(found, float) and not math.isfinite(found) else found


@pytest.mark.parametrize(
    ("kind", "coerced"), [(int, coerced_int), (float, coerced_number), (bool, coerced_bool)]
)
@given(value=JSON)
def test_values_are_coerced_as_pydantic_does(kind: type, coerced: Any, value: Any) -> None:
    expected = taken(TypeAdapter(kind), value)
    found = coerced(value)
    if expected is REFUSED or (kind is float and type(value) is int):
        # An integer is a number as it is.
        assert (type(found), found) == (type(value), value)
    else:
        assert (type(found), found) == (kind, expected)


def classes() -> list[tuple[type[BaseModel], Any]]:
    """SGLang's class of each API's body, and the kinds of the fields that the router checks."""
    from sglang_ext.patches.cpu import torchvision

    torchvision.apply()
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.openai import protocol

    return [
        (protocol.ChatCompletionRequest, CHAT.kinds),
        (protocol.CompletionRequest, COMPLETIONS.kinds),
        (protocol.ResponsesRequest, RESPONSES),
        (AnthropicMessagesRequest, MESSAGES),
    ]


def test_each_field_takes_what_its_class_takes() -> None:
    differences, compared = [], 0
    for owner, kinds in classes():
        for name, field in owner.model_fields.items():
            kind = kinds.get(name)
            if kind not in ("number", "boolean", "integer", "seed", "count", "positive", "choices", "top"):
                continue
            adapter: TypeAdapter[Any] = TypeAdapter(field.annotation)
            for value in VALUES:
                expected = taken(adapter, value)
                body = {name: copy.deepcopy(value)}
                try:
                    check_fields(body, kinds, LIMITS)
                    found = body[name]
                except RequestRefused as refused:
                    found = REFUSED if refused.code == "invalid_type" else expected  # its range
                compared += 1
                if found != expected:
                    differences.append(f"{owner.__name__}.{name}: {value!r} is {found!r}, {expected!r} there")
    assert compared > 1000
    assert differences == []


def test_what_no_server_coerces_is_refused() -> None:
    """The sampling parameters of ``/generate`` reach SGLang's own class as they came."""
    for name, kind in SAMPLING.items():
        if kind in ("string", "strings", "patterns", "stops"):
            continue
        with pytest.raises(RequestRefused) as caught:
            GENERATE.parse({"text": "a", "sampling_params": {name: "1"}}, LIMITS)
        assert (caught.value.param, caught.value.code) == (f"sampling_params.{name}", "invalid_type")


def test_coerced_values_are_what_a_request_is_admitted_by() -> None:
    job = CHAT.parse(
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": "8",
            "temperature": "0",
            "stream": "true",
            "n": 2.0,
        },
        LIMITS,
    )
    assert (job.prompts[0].max_new_tokens, job.stream, job.choices) == (8, True, 2)
    job = COMPLETIONS.parse({"prompt": "a", "max_tokens": "8", "stop_token_ids": ["3"]}, LIMITS)
    assert job.prompts[0].max_new_tokens == 8
    with pytest.raises(RequestRefused, match="at least 1"):
        CHAT.parse({"messages": [{"role": "user", "content": "a"}], "n": "0"}, LIMITS)
    job = GENERATE.parse({"text": "a", "stream": "1", "return_logprob": "yes"}, LIMITS)
    assert job.stream
