"""Events are the same wherever the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.api import sse
from sglang_ext.router.api.sse import EventFilter, EventSplitter


def split(chunks: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for chunk in chunks for event in splitter.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b": comment\nevent: x\nid: 1\ndata: a\n\n", [b"a"]),
        (b"database: no\n\n", []),
        (b"\n\n\n\ndata: a\n\n\n", [b"a"]),
        (b"data: cut off\n", []),
        (b"data: cut off", []),
    ],
)
def test_events(stream, events) -> None:
    assert split([stream]) == events
    assert split([bytes([byte]) for byte in stream]) == events


line = st.binary(max_size=12).map(lambda value: value.replace(b"\n", b"").replace(b"\r", b""))
field = st.sampled_from([b"data: ", b"data:", b"event: ", b": ", b""])
newline = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    end = draw(newline)
    lines = draw(st.lists(st.tuples(field, line), max_size=20))
    stream = b"".join(name + value + end for name, value in lines)
    return stream, sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))


@given(streams())
def test_where_it_is_cut_does_not_matter(case) -> None:
    stream, cuts = case
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert split(chunks) == split([stream])
    assert split(chunks) == reference(stream)


def reference(stream: bytes) -> list[bytes]:
    """The standard's algorithm, line by line on the whole stream."""
    events, data = [], []
    lines = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    for text in lines[:-1]:
        if not text:
            if data:
                events.append(b"\n".join(data))
            data = []
            continue
        name, colon, value = text.partition(b":")
        if name == b"data" and (colon or text == b"data"):
            data.append(value[1:] if value.startswith(b" ") else value)
    return events


def test_an_endless_event_is_skipped_and_does_not_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    events = []
    for chunk in (b"data: ", *[b"x" * 60] * 5, b"\ndata: y\n", b"\ndata: z\n\n"):
        events += splitter.feed(chunk)
        assert len(splitter._line) <= 161
    assert events == [b"z"]


def test_it_knows_whether_it_stands_in_the_middle_of_an_event() -> None:
    splitter = EventSplitter()
    assert not splitter.in_event
    splitter.feed(b"data: a")
    assert splitter.in_event
    splitter.feed(b"\n")
    assert splitter.in_event
    splitter.feed(b"\n")
    assert not splitter.in_event


SIDE = b'data: {"choices":[],"sglext":{"cached_tokens_details":{"device":3}}}\n\n'
PLAIN = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"sglext\\":{ \\"choices\\":[]"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize("place", range(len(PLAIN) + 1))
def test_what_was_asked_for_on_the_side_is_taken_out(size: int, place: int) -> None:
    raw = b"".join([*PLAIN[:place], SIDE, *PLAIN[place:]])
    events = EventFilter(b'"sglext":{', b'"choices":[]')
    out = b"".join(events.feed(raw[i : i + size]) for i in range(0, len(raw), size))
    assert out + events.end() == b"".join(PLAIN)


def test_what_is_not_complete_is_held_back_and_never_lost() -> None:
    events = EventFilter(b'"sglext":{', b'"choices":[]')
    assert events.feed(PLAIN[0] + b"data: {") == PLAIN[0]
    assert events.end() == b"data: {"
    assert events.end() == b""
