"""Where a stream goes on at another instance: the client gets every character once."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.stream_splice import NoContinuation, StreamSplice
from sglang_ext.router.api.usage import StreamReader

Json = dict[str, Any]


def sse(*events: Json | str) -> bytes:
    return b"".join(
        b"data: " + (event.encode() if isinstance(event, str) else orjson.dumps(event)) + b"\n\n"
        for event in events
    )


def chat(text: str | None, *, role: str | None = None, finish: str | None = None, created: int = 5) -> Json:
    delta = {"role": role, "content": text}
    return {
        "id": "r",
        "created": created,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }


def native(text: str, ids: list[int], finish: Json | None = None) -> Json:
    meta = {"id": "r", "completion_tokens": len(ids), "finish_reason": finish}
    return {"text": text, "output_ids": ids, "meta_info": meta}


def read(dialect: Dialect, *events: Json | str) -> StreamReader:
    reader = StreamReader(dialect, 1)
    reader.feed(sse(*events))
    return reader


def splice(dialect: Dialect, *events: Json | str) -> StreamSplice:
    assert dialect.splice is not None
    return dialect.splice(read(dialect, *events))


def obstacle(dialect: Dialect, *events: Json | str) -> str:
    assert dialect.splice is not None
    return dialect.splice.obstacle(read(dialect, *events))


def contents(data: bytes) -> list[str]:
    events = [orjson.loads(part[6:]) for part in data.split(b"\n\n") if part and b"[DONE]" not in part]
    return [choice["delta"]["content"] for event in events for choice in event["choices"]]


@given(
    st.text(alphabet="aé世🙂 ", max_size=30),
    st.lists(st.integers(0, 30), max_size=5),
    st.lists(st.integers(0, 30), max_size=5),
    st.integers(0, 30),
    st.lists(st.integers(1, 400), max_size=6),
)
def test_every_character_comes_once(
    text: str, mine: list[int], theirs: list[int], seam_at: int, cuts: list[int]
) -> None:
    """However both instances cut the text into events, wherever the seam is, and however bytes are cut."""

    def parts(upto: str, at: list[int]) -> list[str]:
        marks = sorted({0, len(upto), *(place for place in at if place <= len(upto))})
        return [upto[start:end] for start, end in itertools.pairwise(marks)]

    delivered = text[:seam_at]
    begun = [chat("", role="assistant"), *(chat(part) for part in parts(delivered, mine))]
    seam = splice(CHAT, *begun)
    whole = [chat("", role="assistant", created=9), *(chat(part, created=9) for part in parts(text, theirs))]
    data = sse(*whole, chat(None, finish="stop", created=9), "[DONE]")
    got, start = b"", 0
    for end in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        got += seam.feed(data[start:end])
        start = end
    seam.check_end()
    assert delivered + "".join(part or "" for part in contents(got)) == text
    assert got.endswith(b"data: [DONE]\n\n")
    assert all(part is None or part for part in contents(got)), "an event that says nothing was passed on"
    assert b'"created":9' not in got


def test_the_other_answer_is_refused() -> None:
    seam = splice(CHAT, chat("", role="assistant"), chat("The map"))
    with pytest.raises(NoContinuation):
        seam.feed(sse(chat("The lamp")))


def test_an_answer_that_ends_too_early_is_refused() -> None:
    seam = splice(CHAT, chat("The map"))
    assert seam.feed(sse(chat("The"), chat("", finish="stop"))) != b""
    with pytest.raises(NoContinuation):
        seam.check_end()


def test_events_with_the_whole_answer_go_on_where_they_were() -> None:
    seam = splice(GENERATE, native("a", [1]), native("ab", [1, 2]))
    assert seam.feed(sse(native("ab", [1, 2]))) == b""
    more = native("abc", [1, 2, 3])
    assert seam.feed(sse(more, "[DONE]")) == sse(more, "[DONE]")
    seam.check_end()


@pytest.mark.parametrize(
    "other", [native("axc", [1, 9, 3]), native("abbc", [1, 2, 2, 3]), native("b", [2, 3])]
)
def test_a_token_that_is_lost_repeated_or_another_is_seen(other: Json) -> None:
    before = native("abc", [1, 2, 3]) if len(other["output_ids"]) > 3 else native("ab", [1, 2])
    seam = splice(GENERATE, native("a", [1]), before)
    with pytest.raises(NoContinuation):
        seam.feed(sse(other))


def test_increments_and_first_events_are_not_spliced() -> None:
    assert obstacle(GENERATE, native("a", [1])) == "again"
    both = {**native("b", [2]), "meta_info": {"completion_tokens": 2, "finish_reason": None}}
    assert "incremental" in obstacle(GENERATE, native("a", [1]), both)
    assert obstacle(GENERATE, native("a", [1]), native("ab", [1, 2])) == ""
    assert obstacle(CHAT, chat("a")) == ""
