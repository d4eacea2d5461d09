"""The server's own tokens of an answer stand in the prompt of the next turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.keys import decode_tokens, encode_tokens
from sglang_ext.router import RouterConfig
from sglang_ext.router.clients.answer_ids import IdsFilter, without_ids
from sglang_ext.router.tokens.answers import KeptAnswer, Outcome, Turn, kept_answer, with_answer
from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer
from sglang_ext.testing.tokenizer import EOS_TOKEN_ID
from tests.support.servers.workers import StandInWorker

Json = dict[str, Any]
ASKED = "return_output_ids_in_sglext"
ANSWER = " reading the file is the next thing to do"
END = [EOS_TOKEN_ID]
SESSION = {"x-session-id": "s1"}
ON = {"session_answer_bytes": 1 << 20}


def in_other_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, one of which is sampled as two."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    entries = tokenizer.get_vocab()
    for at, token in enumerate(ids):
        entry = tokenizer.convert_ids_to_tokens(token)
        for cut in range(2, len(entry)):
            if entry[:cut] in entries and entry[cut:] in entries:
                found = [*ids[:at], entries[entry[:cut]], entries[entry[cut:]], *ids[at + 1 :]]
                assert tokenizer.decode(found) == text
                return found
    raise AssertionError("every token is whole")


@pytest.fixture(scope="module")
def tokens(tokenizer_dir: Path) -> Any:
    return load_tokenizer(str(tokenizer_dir), trust_remote_code=False)


class Talk:
    """A conversation of a client with a router, in front of one worker."""

    def __init__(self, client: Any, router: Any, worker: StandInWorker) -> None:
        self.client, self.router, self.worker = client, router, worker
        self.messages: list[Json] = []

    async def say(self, text: str, *, stream: bool = False, headers: Json = SESSION, **fields: Any) -> bytes:
        """A turn; its answer goes into the conversation. Returns the answer's bytes."""
        self.messages.append({"role": "user", "content": text})
        body = {"model": "default", "messages": self.messages, "stream": stream, **fields}
        name = {"x-request-id": f"turn-{len(self.messages)}"}
        async with self.client.post(
            self.router.url + "/v1/chat/completions", json=body, headers={**headers, **name}
        ) as answer:
            assert answer.status == 200, await answer.text()
            data: bytes = await answer.read()
        self.messages.append({"role": "assistant", "content": content_of(data, stream)})
        return data

    @property
    def sent(self) -> Json:
        """The body that the worker was sent last."""
        return self.worker.requests[-1][1]

    async def outcome(self) -> Json:
        """Of the last turn."""
        url = f"{self.router.url}/explain/turn-{len(self.messages) - 1}"
        async with self.client.get(url) as answer:
            assert answer.status == 200
            found: Json = (await answer.json())["splice"]
            return found


def content_of(data: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(data)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())
    )


@pytest.fixture
def talk(client, start_worker, start_router) -> Callable[..., Awaitable[Talk]]:
    async def start(worker: StandInWorker | None = None, **options: Any) -> Talk:
        worker = worker or await start_worker()
        return Talk(client, await start_router(worker, **{**ON, **options}), worker)

    return start


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_of_the_next_turn_has_the_generated_ids(talk, tokens, stream: bool) -> None:
    talking = await talk()
    generated = in_other_tokens(tokens, ANSWER)
    talking.worker.next_ids = [[*generated, *END], [*generated, *END]]
    await talking.say("what next?", stream=stream)
    first = talking.worker.render(talking.messages[:1])
    assert talking.sent[ASKED] is True
    assert "input_ids" not in talking.sent
    assert (await talking.outcome())["outcome"] == "answer-unknown"

    await talking.say("go on", stream=stream)
    ids = talking.sent["input_ids"]
    assert ids[: len(first) + len(generated)] == first + generated
    assert tokens.decode(ids) == tokens.decode(talking.worker.render(talking.messages[:3]))
    assert ids != talking.worker.render(talking.messages[:3])
    found = await talking.outcome()
    assert found["outcome"] == "spliced"
    assert found["saved_tokens"] > 0

    # The turn after it has the tokens of both answers.
    await talking.say("and then?", stream=stream)
    last = talking.sent["input_ids"]
    assert last[: len(ids) + len(generated)] == ids + generated
    assert tokens.decode(last) == tokens.decode(talking.worker.render(talking.messages[:5]))
    async with talking.client.get(talking.router.url + "/metrics") as answer:
        text = await answer.text()
    assert 'sglang_ext_router_answer_splices_total{outcome="spliced"} 2.0' in text
    assert 'sglang_ext_router_answer_splices_total{outcome="answer-unknown"} 1.0' in text


async def test_more_of_the_prompt_is_cached_than_without(talk, tokens) -> None:
    cached = []
    for options in (ON, {"session_answer_bytes": 0}):
        talking = await talk(**options)
        talking.worker.next_ids = [[*in_other_tokens(tokens, ANSWER), *END]]
        await talking.say("what next?")
        answer = json.loads(await talking.say("go on"))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] > cached[1] > 0


async def test_the_same_tokens_go_as_text(talk) -> None:
    talking = await talk()
    await talking.say("what next?")
    await talking.say("go on")
    assert "input_ids" not in talking.sent
    assert await talking.outcome() == {"outcome": "same-tokens", "saved_tokens": 0}


@pytest.mark.parametrize(
    ("edited", "outcome"),
    [
        (ANSWER, "spliced"),
        (ANSWER + ".", "answer-changed"),
        (ANSWER.replace("file", "folder"), "answer-changed"),
        (ANSWER[:-1], "answer-changed"),
        ("", "answer-changed"),
    ],
)
async def test_an_edited_answer_goes_as_text(talk, tokens, edited: str, outcome: str) -> None:
    talking = await talk()
    talking.worker.next_ids = [[*in_other_tokens(tokens, ANSWER), *END]]
    await talking.say("what next?")
    talking.messages[-1]["content"] = edited
    await talking.say("go on")
    assert ("input_ids" in talking.sent) is (edited == ANSWER)
    assert (await talking.outcome())["outcome"] == outcome


async def test_an_earlier_message_that_changed_goes_as_text(talk, tokens) -> None:
    talking = await talk()
    talking.worker.next_ids = [[*in_other_tokens(tokens, ANSWER), *END]]
    await talking.say("what next?")
    talking.messages[0]["content"] = "what now?"
    await talking.say("go on")
    assert "input_ids" not in talking.sent
    assert (await talking.outcome())["outcome"] == "prompt-changed"


async def test_other_sessions_and_requests_without_one_are_sent_as_they_are(talk, tokens) -> None:
    talking = await talk()
    talking.worker.next_ids = [[*in_other_tokens(tokens, ANSWER), *END]]
    await talking.say("what next?")
    await talking.say("go on", headers={"x-session-id": "s2"})
    assert "input_ids" not in talking.sent
    assert (await talking.outcome())["outcome"] == "answer-unknown"
    await talking.say("and then?", headers={})
    assert ASKED not in talking.sent
    assert await talking.outcome() is None


async def test_ids_of_another_answer_are_not_taken(talk, tokens) -> None:
    """Twin: the worker tells one id other than it generated."""
    talking = await talk()
    generated = in_other_tokens(tokens, ANSWER)
    talking.worker.next_ids = [[*generated, *END]]
    talking.worker.ids_told = [*generated[:-1], generated[-1] + 1, *END]
    await talking.say("what next?")
    await talking.say("go on")
    assert "input_ids" not in talking.sent
    assert (await talking.outcome())["outcome"] == "answer-changed"


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_template_that_strips_reasoning(
    client, start_worker, talk, tokens, tokenizer_dir: Path, tmp_path: Path, keeps: bool
) -> None:
    folder = tmp_path / "strips"
    shutil.copytree(tokenizer_dir, folder)
    if not keeps:
        template = folder / "chat_template.jinja"
        text = template.read_text("utf-8")
        stripped = "message['content'].split('</think>')[-1]"
        assert "message['content']" in text
        template.write_text(text.replace("message['content']", stripped), "utf-8")
    loaded = load_tokenizer(str(folder), trust_remote_code=False)
    talking = await talk(await start_worker(tokenizer=loaded, tokenizer_path=str(folder)))
    generated = in_other_tokens(tokens, f"<think> look</think>{ANSWER}")
    talking.worker.next_ids = [[*generated, *END]]
    await talking.say("what next?")
    await talking.say("go on")
    assert ("input_ids" in talking.sent) is keeps
    assert (await talking.outcome())["outcome"] == ("spliced" if keeps else "answer-changed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"return_cached_tokens_details": True}])
@pytest.mark.parametrize("details", [True, False])
async def test_the_client_gets_the_answer_of_a_server_that_was_not_asked(
    talk, tokens, stream: bool, fields: Json, details: bool
) -> None:
    answers = []
    for options in (ON, {"session_answer_bytes": 0}):
        talking = await talk(cache_details=details, **options)
        talking.worker.next_ids = [[*in_other_tokens(tokens, ANSWER), *END]]
        answers.append(
            await talking.say("what next?", stream=stream, stream_options={"include_usage": True}, **fields)
            if stream
            else await talking.say("what next?", **fields)
        )
    assert answers[0] == answers[1]
    assert b"output_ids" not in answers[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_gets_the_ids(talk, tokens, stream: bool) -> None:
    talking = await talk(cache_details=False)
    generated = [*in_other_tokens(tokens, ANSWER), *END]
    talking.worker.next_ids = [generated]
    assert orjson.dumps(generated) in (await talking.say("what?", stream=stream, **{ASKED: True})).replace(
        b" ", b""
    )
    await talking.say("go on")
    assert "input_ids" in talking.sent


async def test_other_apis_are_counted(talk, client) -> None:
    talking = await talk()
    body = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    url = talking.router.url
    async with client.post(url + "/v1/messages", json=body, headers=SESSION) as answer:
        assert answer.status == 200
    async with client.get(url + "/metrics") as answer:
        assert 'answer_splices_total{outcome="other-api"} 1.0' in await answer.text()


async def test_memory_is_bounded(talk) -> None:
    talking = await talk(session_answer_bytes=4000)
    for number in range(20):
        talking.messages.clear()
        await talking.say("what next? " * 20, headers={"x-session-id": f"s{number}"})
    async with talking.client.get(talking.router.url + "/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if 'table="session-answers"' in line]
    sizes = {line.partition("{")[0]: float(line.split()[-1]) for line in lines}
    assert sizes
    assert max(sizes.values()) <= 4000


def test_ids_are_cut_out_wherever_a_stream_is_cut() -> None:
    content = (
        b'data: {"id":"x","choices":[{"delta":{"content":"a \\"sglext\\":{\\"output_ids\\":[[1]]}"}}]}\n\n'
    )
    alone = b'data: {"id":"x","choices":[],"usage":null,"sglext":{"output_ids":[[1,2],[3]]}}\n\n'
    head = b'data: {"id":"x","choices":[],"sglext":{"cached_tokens_details":{"device":3}'
    among, rest = head + b',"output_ids":[[1]]}}\n\n', head + b"}}\n\n"
    done = b"data: [DONE]\n\n"
    stream, wanted = content + alone + among + done, content + rest + done
    for cut in range(len(stream)):
        found = IdsFilter()
        assert found.feed(stream[:cut]) + found.feed(stream[cut:]) + found.end() == wanted
    broken = IdsFilter()
    assert broken.feed(content + b'data: {"id"') + broken.end() == content + b'data: {"id"'


def test_ids_are_cut_out_of_an_answer() -> None:
    plain = {"id": "x", "choices": [{"message": {"content": '"sglext":{"output_ids":[[1]]}'}}], "usage": {}}
    whole = orjson.dumps(plain)
    assert without_ids(whole) is whole
    assert without_ids(orjson.dumps({**plain, "sglext": {"output_ids": [[1, 2]]}})) == whole
    details = {"cached_tokens_details": {"device": 3}}
    both = orjson.dumps({**plain, "sglext": {**details, "output_ids": [[1, 2], []]}})
    assert without_ids(both) == orjson.dumps({**plain, "sglext": details})


def by_words(text: str) -> bytes:
    """A tokenizer that takes whole words."""
    return encode_tokens([int.from_bytes(word.encode()) for word in text.split(" ")])


def words_of(key: bytes) -> str:
    ids = decode_tokens(key).tolist()
    return " ".join(each.to_bytes(3).strip(b"\0").decode() for each in ids)


def opened(text: str, *kept: KeptAnswer) -> Turn:
    return with_answer(text, by_words(text), kept, ("|",), by_words)


def test_an_answer_that_is_joined_with_the_text_behind_it() -> None:
    kept = kept_answer(opened("q"), by_words("a") + by_words("b"), words_of)
    assert kept is not None
    assert opened("q a b|", kept).outcome is Outcome.JOINED
    # Where its end is not seen, it is another one.
    assert opened("q a b c", kept).outcome is Outcome.ANSWER_CHANGED
    assert opened("q a", kept).outcome is Outcome.ANSWER_CHANGED
    assert opened("r a b|", kept).outcome is Outcome.PROMPT_CHANGED


def test_bytes_that_are_no_character_are_not_kept() -> None:
    turn = opened("q")
    cut = "\N{REPLACEMENT CHARACTER}"
    assert kept_answer(turn, by_words("a"), words_of) is not None
    assert kept_answer(turn, by_words("a"), lambda key: words_of(key).replace("a", cut)) is None
    assert kept_answer(turn, b"", words_of) is None


def test_the_memory_is_a_size() -> None:
    with pytest.raises(ConfigError):
        RouterConfig(session_answer_bytes=-1)
