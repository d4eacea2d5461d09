"""Tokens, whole and in segments; trust in tokenizers; requests without a tokenizer."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.keys import decode_tokens, encode_tokens
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.api.messages import MESSAGES
from sglang_ext.router.api.responses import RESPONSES
from sglang_ext.router.api.validation import Limits
from sglang_ext.router.fleet.facts import ChatFacts, InstanceFacts, ModelFacts
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tokens.chat_template import CannotRender, text_of
from sglang_ext.router.tokens.prompt_tokenizer import PromptTokenizer
from sglang_ext.router.tokens.segments import Segmenter, TokenCache
from sglang_ext.router.tokens.tokenizer_check import EVERYTHING, Trust, compare
from sglang_ext.router.tokens.tokenizing import Fallback, TokenizerService

pytestmark = pytest.mark.slow

FACTS = InstanceFacts(ModelFacts("tiny", "LlamaForCausalLM", 32_000, 4096), "1", "x", "colocated", "")


def ids(key: bytes) -> list[int]:
    return [int(token) for token in decode_tokens(key)]


@pytest.fixture(scope="module")
def prompt_tokenizer(tokenizer_dir) -> PromptTokenizer:
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

    fresh = load_tokenizer(str(tokenizer_dir), trust_remote_code=False)
    return PromptTokenizer(fresh, FACTS, TokenCache(1 << 20))


MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
pieces = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*MARKS, " ", "\n", "it's", "<|im_"])), max_size=8
)


@given(pieces)
def test_segments_make_the_tokens_of_the_whole(prompt_tokenizer, tokenizer, parts) -> None:
    text = "".join(parts)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert ids(prompt_tokenizer.segmenter.encode(text)) == expected
    assert ids(prompt_tokenizer.segmenter.encode(text)) == expected


@given(st.text(max_size=30))
def test_text_is_tokenized_as_generate_does(prompt_tokenizer, tokenizer, text) -> None:
    assert ids(prompt_tokenizer.encode_text(text)) == tokenizer([text])["input_ids"][0]


def test_a_growing_conversation_tokenizes_only_what_is_new(tokenizer) -> None:
    asked: list[str] = []

    def encode(texts):
        asked.extend(texts)
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    segmenter = Segmenter(encode, MARKS, (), TokenCache(1 << 20))
    assert segmenter.by_segment
    asked.clear()
    first = "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    segmenter.encode(first)
    asked.clear()
    segmenter.encode(first + "Hello<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n")
    assert asked == ["<|im_start|>assistant\nHello", "<|im_start|>user\nMore"]


def test_a_tokenizer_that_looks_beyond_special_tokens_is_not_cut() -> None:
    """A tokenizer that marks the start of its input, wherever that is, in SentencePiece's old manner."""

    def encode(texts):
        return [[ord(char) for char in "_" + text.replace("</s>", "\0")] for text in texts]

    segmenter = Segmenter(encode, ["</s>"], (), TokenCache(1 << 20))
    assert not segmenter.by_segment
    assert ids(segmenter.encode("a</s>b")) == [ord("_"), ord("a"), 0, ord("b")]


def test_the_cache_is_bounded_and_forgets_the_least_recently_used() -> None:
    cache = TokenCache(1000)
    for number in range(10):
        cache.put(bytes([number]), b"text", b"x" * 46)
        cache.get(b"\0", b"text")
    assert cache.size_bytes <= 1000
    assert cache.get(b"\0", b"text") is not None
    assert cache.get(b"\1", b"text") is None
    assert (len(cache), cache.size_bytes) == (4, 4 * 250)


# -- conversations ----------------------------------------------------------------------------------

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "x"}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def rendered(template: str, body: dict[str, Any], tokenizer, **chat: Any) -> str:
    """The text that a model with this template would see."""
    tokenizer.chat_template = template
    facts = replace(FACTS, chat=ChatFacts(**chat))
    fresh = PromptTokenizer(tokenizer, facts, TokenCache(1 << 20))
    text: str = tokenizer.decode(ids(fresh.encode_chat(Chat({"messages": [USER], **body}))))
    return text


SAYS_ALL = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
ONLY_THE_FIRST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}:{{ m.content }}]"
    "{% endif %}{% endfor %}"
)
REFUSES = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('no') }}{% endfor %}"


IN_PLACE = "[system:a][user:Hi][system:b]"
IN_FRONT = "[system:a\n\nb][user:Hi]"


@pytest.mark.parametrize("dialect", [RESPONSES, MESSAGES], ids=["responses", "messages"])
@pytest.mark.parametrize(
    ("template", "in_place", "seen"),
    [
        (SAYS_ALL, True, IN_PLACE),
        (SAYS_ALL, False, IN_FRONT),
        (ONLY_THE_FIRST, True, IN_FRONT),
        (REFUSES + SAYS_ALL, True, IN_FRONT),
    ],
    ids=["shown", "of an earlier SGLang", "left out", "refused"],
)
def test_system_messages_are_where_sglang_puts_them(
    own_tokenizer: Any, dialect: Dialect, template: str, in_place: bool, seen: str
) -> None:
    own_tokenizer.chat_template = template
    facts = replace(FACTS, chat=ChatFacts(system_in_place=in_place))
    fresh = PromptTokenizer(own_tokenizer, facts, TokenCache(1 << 20))
    of_responses = dialect is RESPONSES
    parts = [{"type": "input_text" if of_responses else "text", "text": "b"}]
    said = [USER, {"role": "system", "content": parts}]
    first = {"instructions": "a", "input": said} if of_responses else {"system": "a", "messages": said}
    (prompt,) = dialect.parse({"model": "m", "max_tokens": 1, **first}, Limits(1000, 4096)).prompts
    assert not prompt.opaque
    assert prompt.chat is not None
    if not of_responses:
        # Anthropic's were always left where the template shows them, and are joined in another way.
        seen = (IN_PLACE if template is SAYS_ALL else seen).replace("\n\n", "\n")
    assert own_tokenizer.decode(ids(fresh.encode_chat(prompt.chat))) == seen


@pytest.fixture
def own_tokenizer(tokenizer_dir) -> Any:
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

    return load_tokenizer(str(tokenizer_dir), trust_remote_code=False)


SHOW = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
PARTS = "{% for message in messages %}{% for c in message.content %}[{{ c.text }}]{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([USER], [{"role": "user", "content": "Hi"}]),
        ([{"role": "SYSTEM", "content": "x"}], [{"role": "system", "content": "x"}]),
        ([{**USER, "name": "Bo", "unknown": 1}], [{"role": "user", "content": "Hi"}]),
        (
            [{"role": "system", "content": "x", "name": "n"}],
            [{"role": "system", "content": "x", "name": "n"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a b"}],
        ),
        (
            [{"role": "assistant", "tool_calls": [CALL]}, USER],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "1",
                            "index": None,
                            "type": "function",
                            "function": {"name": "f", "arguments": {"b": 1, "a": "x"}},
                        }
                    ],
                },
                {"role": "user", "content": "Hi"},
            ],
        ),
        ([USER, {"role": "assistant", "content": "So"}], [USER, {"role": "user", "content": "So"}]),
    ],
)
def test_messages_as_the_template_sees_them(messages, shown, own_tokenizer) -> None:
    text = rendered(SHOW, {"messages": messages}, own_tokenizer)
    assert [json.loads(line) for line in text.splitlines()] == shown


def test_templates_that_loop_over_content_get_parts(own_tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered(PARTS, {"messages": parts}, own_tokenizer) == "[a][b]"


def test_tools_are_shown_as_sglang_dumps_them(own_tokenizer) -> None:
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    text = rendered(template, {"tools": [TOOL]}, own_tokenizer)
    assert text == (
        '{"type": "function", "function": {"description": null, "name": "f", '
        '"parameters": {"type": "object"}, "strict": false}, "defer_loading": null}'
    )
    assert rendered(template + ".", {"tools": [TOOL], "tool_choice": "none"}, own_tokenizer) == "."
    choice = {"type": "function", "function": {"name": "other"}}
    assert rendered(template + ".", {"tools": [TOOL], "tool_choice": choice}, own_tokenizer) == "."
    flat = "{% for t in tools %}{{ t['name'] + '!' }}{% endfor %}"
    assert rendered(flat, {"tools": [TOOL]}, own_tokenizer) == "f!"


@pytest.mark.parametrize(
    ("body", "defaults", "shown"),
    [
        ({}, (), "||"),
        ({"reasoning_effort": "none"}, (), "False|False|none"),
        ({"reasoning_effort": "high"}, (), "True|True|high"),
        ({"reasoning": {"enabled": True}}, (), "True|True|"),
        ({"reasoning": {"effort": "low"}}, (), "True|True|low"),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, (), "False|True|high"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, (("enable_thinking", False),), "|True|"),
        ({}, (("enable_thinking", False), ("reasoning_effort", "low")), "|False|low"),
    ],
)
def test_switches_of_the_template(body, defaults, shown, own_tokenizer) -> None:
    template = "{{ thinking }}|{{ enable_thinking }}|{{ reasoning_effort }}"
    assert rendered(template, body, own_tokenizer, default_template_kwargs=defaults) == shown


def test_the_last_answer_can_be_continued(own_tokenizer) -> None:
    template = (
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    body = {"messages": [USER, {"role": "assistant", "content": " so"}], "continue_final_message": True}
    assert rendered(template, body, own_tokenizer) == "<Hi>A: so"


@pytest.mark.parametrize(
    ("body", "chat", "why"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            {},
            "image_url",
        ),
        ({"messages": [{"role": "system", "content": "x", "tools": [TOOL]}]}, {}, "tools inside messages"),
        ({"tools": [{"function": {"name": "f", "defer_loading": True}}]}, {}, "defer_loading"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, {}, "chat template of the request"),
        ({"reasoning_effort": 0.5}, {}, "number"),
        ({}, {"reasoning_parser": "hunyuan"}, "hunyuan"),
        ({}, {"chat_template": "vicuna_v1.1"}, "built-in chat template"),
        ({"messages": [{"role": "user", "content": "fail"}]}, {}, "template failed"),
    ],
)
def test_what_cannot_be_rendered_says_why(body, chat, why, own_tokenizer) -> None:
    template = "{% if messages[0].content == 'fail' %}{{ raise_exception('no') }}{% endif %}{{ messages }}"
    with pytest.raises(CannotRender, match=why):
        rendered(template, body, own_tokenizer, **chat)


# -- the service ------------------------------------------------------------------------------------


@pytest.fixture
async def service():
    service = TokenizerService(threads=1, cache_bytes=1 << 20)
    yield service
    service.close()


@pytest.fixture
def fallbacks(service) -> list[Fallback]:
    """The reasons for which the service matched prompts by text."""
    found: list[Fallback] = []
    service.fell_back.subscribe(found.append)
    return found


def job(*prompts: PromptInput) -> Job:
    return Job(False, prompts)


async def test_arguments_that_break_the_template_are_refused_by_name(service, own_tokenizer) -> None:
    """Where the template fails without them, the request goes on to its server, which answers."""
    own_tokenizer.chat_template = "{{ messages[0].missing.more }}"
    service.tokenizer = PromptTokenizer(own_tokenizer, FACTS, TokenCache(1 << 20))
    service.trust = EVERYTHING
    given = {"messages": [USER], "chat_template_kwargs": {"divisor": 1}}
    with pytest.raises(RequestRefused, match="chat_template_kwargs cannot be used") as caught:
        await service.encode(job(PromptInput(chat=Chat(given))))
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")
    (encoded,) = await service.encode(job(PromptInput(chat=Chat({"messages": [USER]}))))
    assert encoded.tokens is None


async def test_without_a_tokenizer_prompts_are_matched_by_text(service, fallbacks, caplog) -> None:
    await service.load(replace(FACTS, tokenizer_path="/no/such/folder"))
    assert "matched by text" in service.status
    assert any(
        record.levelname == "WARNING" and "/no/such/folder" in record.message for record in caplog.records
    )
    history = [{"role": "user", "content": "one two three four five six seven"}]
    longer = [*history, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "eight"}]
    short, long, other = await service.encode(
        job(*(PromptInput(chat=Chat({"messages": m})) for m in (history, longer, [USER])))
    )
    assert short.tokens is None
    assert short.namespace[0] == "text"
    assert len(short.key) % 4 == 0
    assert long.key.startswith(short.key)
    assert not other.key.startswith(short.key[:80])
    (ids_only,) = await service.encode(job(PromptInput(ids=array("q", [1, 2, 3]))))
    assert (ids_only.tokens, ids_only.namespace[0]) == (3, "tokens")
    assert fallbacks == [Fallback.NO_TOKENIZER] * 3


async def test_only_what_agrees_with_the_worker_is_trusted(
    service, fallbacks, tokenizer_dir, tokenizer
) -> None:
    await service.load(replace(FACTS, tokenizer_path=str(tokenizer_dir)))
    text, chat = PromptInput(text="Hello"), PromptInput(chat=Chat({"messages": [USER]}))
    assert [e.tokens for e in await service.encode(job(text, chat))] == [None, None]
    assert fallbacks == [Fallback.UNTRUSTED] * 2

    async def theirs(body):
        tokens = await service._sample(body)
        return tokens if "prompt" in body else [*tokens, 0]

    await service.verify(theirs)
    assert service.trust == Trust(text=True, chat=False, tools=False)
    count = len(tokenizer("Hello")["input_ids"])
    assert [e.tokens for e in await service.encode(job(text, chat))] == [count, None]
    await service.verify(service._sample)
    assert service.trust == EVERYTHING
    encoded = (await service.encode(job(text, chat)))[0]
    assert encoded.key == encode_tokens(tokenizer("Hello")["input_ids"])
    opaque = PromptInput(text="Hello", opaque=True)
    assert (await service.encode(job(opaque)))[0].tokens is None
    assert fallbacks[-1] is Fallback.OPAQUE


async def test_the_same_words_about_another_picture_are_another_prompt(service) -> None:
    url = "data:image/png;base64," + "A" * 10_000

    async def key(**fields):
        return (
            await service.encode(GENERATE.parse({"sampling_params": {}, **fields}, Limits(32_000, 4096)))
        )[0]

    for words in ({"text": "What is this?"}, {"input_ids": [5, 6, 7]}):
        one, same, other = [await key(image_data=data, **words) for data in ([url], [url], [url + "B"])]
        assert one == same != other
        assert one.tokens is None
        assert one.key[:8] != other.key[:8]
        assert len(one.key) < 100


def test_a_picture_in_a_conversation_is_matched_by_its_digest() -> None:
    def text(url):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        return text_of(
            {"messages": [{"role": "user", "content": "Hello"}, {"role": "user", "content": parts}]}
        )

    one, other = text("data:" + "A" * 10_000), text("data:" + "A" * 9_999 + "B")
    assert len(one) == len(other) < 400
    assert one != other == text("data:" + "A" * 9_999 + "B")
    assert one[: one.index("Hello")] == other[: other.index("Hello")]
    assert "https://host/a.png" in text("https://host/a.png")


def test_there_are_as_many_threads_as_cores_but_not_too_many(monkeypatch) -> None:
    for cores, threads in ((1, 2), (4, 4), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        service = TokenizerService(threads=0, cache_bytes=1)
        assert service.pool.threads == threads
        service.close()


async def test_a_worker_without_the_endpoint_is_taken_at_its_word() -> None:
    async def ours(body):
        return [1]

    async def theirs(body):
        return None

    assert await compare(ours, theirs) == EVERYTHING


async def test_salts_and_adapters_are_namespaces(service) -> None:
    one, two = await service.encode(
        job(
            PromptInput(ids=array("q", [1]), namespace=(None, None, "a")),
            PromptInput(ids=array("q", [1]), namespace=(None, None, "b")),
        )
    )
    assert one.key == two.key
    assert one.namespace != two.namespace


@pytest.mark.parametrize("knob", ["skew_tokens", "refuses_tools", "has_tokenize"])
async def test_the_router_compares_with_a_worker_at_the_start(knob, start_worker, start_router) -> None:
    worker = await start_worker()
    setattr(worker, knob, knob != "has_tokenize")
    router = await start_router(worker)
    expected = {
        "skew_tokens": Trust(),
        "refuses_tools": Trust(text=True, chat=True, tools=False),
        "has_tokenize": EVERYTHING,
    }
    assert router.tokenizers.trust == expected[knob]


async def test_tokenizing_does_not_hold_up_the_event_loop(start_worker, start_router, client) -> None:
    """While a prompt of 2 MB is tokenized, which takes a good part of a second, the loop goes on turning."""
    router = await start_router(await start_worker(context_length=1 << 30))
    body = {"text": "The quick brown fox. " * 100_000, "sampling_params": {"max_new_tokens": 1}}
    loop = asyncio.get_running_loop()
    encoding = asyncio.Event()
    run = router.tokenizers.pool.run

    def announced(owner: str, size: int, call: Callable[[], Any], *more: Any) -> Any:
        def encode() -> Any:
            loop.call_soon_threadsafe(encoding.set)
            return call()

        return run(owner, size, encode, *more)

    router.tokenizers.pool.run = announced
    data = io.BytesIO(json.dumps(body).encode())
    request = asyncio.ensure_future(client.post(router.url + "/generate", data=data))
    await encoding.wait()
    async with client.get(router.url + "/health") as answer:
        assert answer.status == 200
    assert not request.done()
    async with await request as answer:
        assert answer.status == 200


async def test_what_is_known_or_short_is_not_handed_to_a_thread(service, tokenizer_dir, monkeypatch) -> None:
    await service.load(replace(FACTS, tokenizer_path=str(tokenizer_dir)))
    service.trust = EVERYTHING
    long = job(PromptInput(text="word " * 500))
    first = await service.encode(long)
    with monkeypatch.context() as no_threads:
        no_threads.setattr(service, "pool", object())
        assert await service.encode(long) == first
        assert (await service.encode(job(PromptInput(text="and one more"))))[0].tokens
        with pytest.raises(AttributeError):
            await service.encode(job(PromptInput(text="new " * 500)))
    assert (await service.encode(job(PromptInput(text="new " * 500))))[0].tokens


@given(st.lists(st.text(max_size=12), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_a_conversation_without_settings_is_rendered_as_transformers_does(
    prompt_tokenizer, tokenizer, contents, with_tools, answer_follows
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if with_tools else None
    assert prompt_tokenizer._plainly is not None
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=answer_follows
    )
    assert prompt_tokenizer._plainly(messages, tools, answer_follows) == expected
    assert prompt_tokenizer._plainly(messages, tools, not answer_follows) != expected


def test_a_tokenizer_with_a_rendering_of_its_own_keeps_it(tokenizer) -> None:
    class Own(type(tokenizer)):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "own"

    own = Own.from_pretrained(tokenizer.name_or_path)
    assert PromptTokenizer(own, FACTS, TokenCache(1 << 20))._render([], None, {}, True) == "own"


FOUR_AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer
together = Barrier(4)
def load(_):
    together.wait()
    return load_tokenizer(sys.argv[1], trust_remote_code=False)
with ThreadPoolExecutor(4) as pool:
    print(len(list(pool.map(load, range(4)))))
"""


@pytest.mark.long
def test_several_routers_of_one_process_may_load_their_tokenizers_at_once(tokenizer_dir: Path) -> None:
    """None of them finds transformers half imported. In a process that has not imported it yet."""
    command = [sys.executable, "-c", FOUR_AT_ONCE, str(tokenizer_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "4\n", done.stderr
