"""Documents in bodies: registering one, and requests that name some."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from sglang_ext.errors import PeerError
from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.completions import COMPLETIONS
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.documents import (
    MOST_NAMED,
    Document,
    decode_document,
    hinting_dialect,
    take_document,
    take_names,
    with_documents,
)
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.http.types import RequestRefused

SYSTEM, USER = {"role": "system", "content": "The manual."}, {"role": "user", "content": "Hello"}


def document(kind: str, content: Any, id: str = "d") -> Document:
    return Document("", id, kind, msgspec.Raw(orjson.dumps(content)), 1e12)


TEXT, MORE = document("text", "The manual. "), document("text", "The appendix. ")
IDS, CONVERSATION = document("input_ids", [1, 2, 3]), document("messages", [SYSTEM])


@pytest.mark.parametrize(
    ("dialect", "documents", "body", "meant"),
    [
        (GENERATE, [TEXT], {"text": "Why?"}, {"text": "The manual. Why?"}),
        (GENERATE, [MORE, TEXT], {"text": ""}, {"text": "The appendix. The manual. "}),
        (GENERATE, [IDS, IDS], {"input_ids": [9]}, {"input_ids": [1, 2, 3, 1, 2, 3, 9]}),
        (COMPLETIONS, [TEXT], {"prompt": "Why?", "n": 1}, {"prompt": "The manual. Why?", "n": 1}),
        (COMPLETIONS, [IDS], {"prompt": [9]}, {"prompt": [1, 2, 3, 9]}),
        (CHAT, [CONVERSATION], {"messages": [USER]}, {"messages": [SYSTEM, USER]}),
        (CHAT, [IDS], {"messages": [USER], "input_ids": [9]}, None),
        (GENERATE, [], {"text": "Why?"}, {"text": "Why?"}),
    ],
)
def test_the_documents_stand_in_front_in_their_order(
    dialect: Dialect, documents: list[Document], body: dict[str, Any], meant: dict[str, Any] | None
) -> None:
    named = {"document_ids": ["d"], **body}
    if meant is None:
        with pytest.raises(RequestRefused, match="gives one prompt"):
            with_documents(dialect, named, documents)
        return
    assert orjson.loads(with_documents(dialect, named, documents)) == meant
    assert named == {"document_ids": ["d"], **body}, "the request itself stays as it is"


@pytest.mark.parametrize(
    ("dialect", "documents", "body", "why"),
    [
        (GENERATE, [CONVERSATION], {"text": "x"}, "was registered with messages"),
        (CHAT, [TEXT], {"messages": [USER]}, "was registered with text"),
        (GENERATE, [TEXT, IDS], {"text": "x"}, "must agree"),
        (GENERATE, [TEXT], {"text": ["x", "y"]}, "one prompt as a string in text"),
        (GENERATE, [TEXT], {"input_ids": [1]}, "one prompt as a string in text"),
        (GENERATE, [IDS], {"input_ids": [[1], [2]]}, "one prompt as an array of token ids"),
        (COMPLETIONS, [IDS], {"prompt": ["x"]}, "one prompt as an array of token ids"),
        (CHAT, [CONVERSATION], {}, "one prompt as an array of messages"),
        (MESSAGES, [CONVERSATION], {"messages": [USER]}, "takes no documents"),
        (RESPONSES, [TEXT], {"input": "x"}, "takes no documents"),
        (None, [TEXT], {"session": "s"}, "takes no documents"),
    ],
)
def test_what_does_not_fit_is_refused(
    dialect: Dialect | None, documents: list[Document], body: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestRefused, match=why) as refused:
        with_documents(dialect, body, documents)
    assert refused.value.status == 400
    assert str(refused.value.param).startswith("document_ids")


@pytest.mark.parametrize("value", ["d", {"d": 1}, [1], ["d"] * (MOST_NAMED + 1)])
def test_names_are_an_array_of_texts(value: Any) -> None:
    with pytest.raises(RequestRefused, match="document"):
        take_names({"document_ids": value})


def test_no_names_name_nothing() -> None:
    assert take_names({}) == take_names({"document_ids": None}) == take_names({"document_ids": []}) == ()
    assert take_names({"document_ids": ["b", "a", "b"]}) == ("b", "a", "b")


def test_the_form_of_a_hint_is_that_of_the_api_that_takes_its_prompt() -> None:
    assert hinting_dialect({"text": "x"}) is GENERATE
    assert hinting_dialect({"prompt": "x"}) is COMPLETIONS
    assert hinting_dialect({"session": "s"}) is None


def test_a_registration_is_taken() -> None:
    body = {"text": "The manual.", "ttl_s": 60, "instances": 2, "extra_key": "k", "priority": 3}
    taken = take_document(body, "manual-1.2_b", "scope-", "salt", 3, 100.0, 200.0, 3600.0)
    assert taken == Document(
        *("scope-", "manual-1.2_b", "text", msgspec.Raw(b'"The manual."'), 160.0, "salt", "k", 3, 2),
        200_000,
    )
    assert decode_document(msgspec.json.encode(taken)) == taken
    assert decode_document(msgspec.json.encode(taken.deleted(101.0, 201.0))).is_deleted
    assert take_document({"input_ids": [1]}, "a", "", None, 0, 100.0, 200.0, 3600.0).expires == 3700.0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"scope":"","id":"d","kind":"text","expires":1}',
        b'{"scope":"","id":"d","kind":"text","content":[1],"expires":1}',
        b'{"scope":"","id":"d","kind":"messages","content":"x","expires":1}',
        b'{"scope":"","id":"d","kind":"other","content":"x","expires":1}',
        b'{"scope":"","id":"d","kind":"text","content":"x","expires":1,"more":1}',
    ],
)
def test_what_is_no_document_is_refused(body: bytes) -> None:
    with pytest.raises(PeerError):
        decode_document(body)


@pytest.mark.parametrize(
    ("id", "body", "param"),
    [
        ("", {"text": "x"}, "id"),
        ("a/b", {"text": "x"}, "id"),
        (".hidden", {"text": "x"}, "id"),
        ("x" * 129, {"text": "x"}, "id"),
        ("d", {}, "text"),
        ("d", {"text": "x", "input_ids": [1]}, "input_ids"),
        ("d", {"text": "x", "cache_salt": "another's"}, "cache_salt"),
        ("d", {"text": "x", "ttl_s": -1}, "ttl_s"),
        ("d", {"text": "x", "instances": 0}, "instances"),
        ("d", {"text": "x", "extra_key": 1}, "extra_key"),
    ],
)
def test_a_wrong_registration_names_the_field(id: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        take_document(body, id, "", None, 0, 0.0, 0.0, 60.0)
    assert (refused.value.status, refused.value.param) == (400, param)
