"""Token counts in answers."""

from __future__ import annotations

import json

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.completions import COMPLETIONS
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.usage import StreamReader, Usage, read_answer


def native(prompt: int, cached: int, output: list[int], *, finished: bool = True, index: int | None = None):
    answer = {
        "text": "x",
        "output_ids": output,
        "meta_info": {
            "finish_reason": {"type": "stop"} if finished else None,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "completion_tokens": len(output),
        },
    }
    return answer if index is None else {**answer, "index": index}


def sse(*events: object) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    )


def test_native_answers() -> None:
    usage = read_answer(json.dumps(native(10, 4, [7, 8])).encode(), GENERATE, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (10, 4, 2)
    assert usage.output_keys == {0: encode_tokens([7, 8])}


def test_a_batch_adds_up_and_choices_share_their_prompt() -> None:
    batch = json.dumps([native(10, 4, [1]), native(20, 0, [2, 3])]).encode()
    usage = read_answer(batch, GENERATE, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (30, 4, 3)
    assert usage.output_keys == {0: encode_tokens([1]), 1: encode_tokens([2, 3])}
    usage = read_answer(batch, GENERATE, 2)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (10, 4, 3)
    assert usage.output_keys == {}


def test_ids_that_are_only_the_latest_are_not_taken_for_the_whole() -> None:
    answer = native(10, 0, [5])
    answer["meta_info"]["completion_tokens"] = 9
    assert read_answer(json.dumps(answer).encode(), GENERATE, 1).output_keys == {}


@pytest.mark.parametrize(
    ("details", "cached"), [({"cached_tokens": 7}, 7), (None, None), ({"cached_tokens": "x"}, None)]
)
def test_openai_answers(details, cached) -> None:
    answer = {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": details}}
    usage = read_answer(json.dumps(answer).encode(), CHAT, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (9, cached, 2)


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"null", b'{"usage": 5}', b'{"meta_info": []}'])
@pytest.mark.parametrize("is_native", [True, False])
def test_an_answer_that_cannot_be_read_says_nothing(body, is_native) -> None:
    assert read_answer(body, GENERATE if is_native else CHAT, 1) == Usage()


def test_native_streams() -> None:
    stream = sse(
        native(10, 4, [7], finished=False, index=0),
        native(20, 2, [8, 9], index=1),
        native(10, 4, [7, 8], index=0),
    )
    reader = StreamReader(GENERATE, 1)
    for byte in range(0, len(stream), 7):
        reader.feed(stream[byte : byte + 7])
    assert reader.done
    assert not reader.in_event
    assert (reader.usage.prompt_tokens, reader.usage.cached_tokens) == (30, 6)
    assert reader.usage.output_keys == {0: encode_tokens([7, 8]), 1: encode_tokens([8, 9])}


def test_openai_streams() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    reader = StreamReader(CHAT, 1)
    reader.feed(sse({"choices": [{}], "usage": None}, {"choices": [], "usage": usage}))
    assert reader.done
    assert (reader.usage.prompt_tokens, reader.usage.cached_tokens) == (9, 3)


def test_a_stream_that_ends_early_is_not_done() -> None:
    reader = StreamReader(GENERATE, 1)
    reader.feed(b'data: {"text"')
    assert reader.in_event
    assert not reader.done
    reader.feed(b": broken\n\n")
    assert reader.usage == Usage()


def test_texts_are_put_together_from_a_stream() -> None:
    def delta(index: int, **part: object) -> dict[str, object]:
        return {"choices": [{"index": index, "delta": part}]}

    reader = StreamReader(CHAT, 1)
    reader.feed(sse(delta(0, role="assistant", content=""), delta(0, content="a"), delta(0, content="b")))
    assert reader.output_texts() == {0: "ab"}
    reader = StreamReader(COMPLETIONS, 1)
    reader.feed(sse({"choices": [{"index": 1, "text": "x"}]}, {"choices": [{"index": 0, "text": "y"}]}))
    assert reader.output_texts() == {0: "y", 1: "x"}


@pytest.mark.parametrize("part", [{"tool_calls": [{}]}, {"reasoning_content": "hm"}])
def test_text_that_is_not_what_was_generated_is_left_out(part) -> None:
    answers = [
        {"choices": [{"index": 0, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": part}]},
    ]
    reader = StreamReader(CHAT, 1)
    reader.feed(sse(*answers))
    assert reader.output_texts() == {}
    message = {"role": "assistant", "content": "a", **part}
    body = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
    assert read_answer(body, CHAT, 1).output_texts == {}


def test_very_long_streams_are_not_kept(monkeypatch) -> None:
    from sglang_ext.router.api import usage

    monkeypatch.setattr(usage, "MAX_TEXT_BYTES", 100)
    reader = StreamReader(CHAT, 1)
    for _ in range(100):
        reader.feed(sse({"choices": [{"index": 0, "text": "x" * 20}]}))
    assert reader.output_texts() == {}
    assert reader._size < 300
