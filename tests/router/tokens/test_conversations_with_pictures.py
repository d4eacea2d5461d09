"""Conversations with pictures are matched by tokens up to the first picture, and by text from there on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_fetch_planning import FLEET, Channels, carried_out, fetching
from test_router_index import Reporter
from test_tokenizing import FACTS, own_tokenizer  # noqa: F401 - a fixture

from sglang_ext.keys import encode_tokens
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.dispatch.choosing import matches_of
from sglang_ext.router.fleet.facts import ChatFacts
from sglang_ext.router.index.index import Index
from sglang_ext.router.index.prompt_trees import BEGINNING
from sglang_ext.router.policies import Decision, Match, Reason
from sglang_ext.router.policies.base import Fetch
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.prompt_tokenizer import PromptTokenizer
from sglang_ext.router.tokens.segments import TokenCache
from sglang_ext.router.tokens.tokenizer_check import EVERYTHING
from sglang_ext.router.tokens.tokenizing import TokenizerService
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.tokenizer import chat_template

pytestmark = pytest.mark.slow

NS = (None, None, None)
SYSTEM = {"role": "system", "content": "You know each plant by its leaf. " * 8}
IN_FRONT = "{% for m in messages %}{% for p in m.content if p.type == 'image' %}[pic]{% endfor %}{% endfor %}"


def about(picture: str, *after: dict[str, Any], before: str = "Which plant is this? ") -> dict[str, Any]:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + picture * 400}}
    parts = [{"type": "text", "text": before}, url, {"type": "text", "text": " Be brief."}]
    return {"messages": [SYSTEM, {"role": "user", "content": parts}, *after]}


@pytest.fixture
def service(own_tokenizer: Any) -> Any:  # noqa: F811
    service = TokenizerService(threads=1, cache_bytes=1 << 20)
    own_tokenizer.chat_template = chat_template(vision=True)
    facts = replace(FACTS, chat=ChatFacts(multimodal=True))
    service.tokenizer = PromptTokenizer(own_tokenizer, facts, TokenCache(1 << 20))
    service.trust = EVERYTHING
    yield service
    service.close()


async def encoded(service: TokenizerService, *payloads: dict[str, Any]) -> list[Encoded]:
    return await service.encode(Job(False, tuple(PromptInput(chat=Chat(p), namespace=NS) for p in payloads)))


async def test_the_tokens_before_the_first_picture_are_those_of_any_prompt(service, own_tokenizer) -> None:  # noqa: F811
    answered = ({"role": "assistant", "content": "A fern."}, {"role": "user", "content": "Sure?"})
    words = {"messages": [SYSTEM, {"role": "user", "content": "Which plant is this? "}]}
    one, same, other, longer, text = await encoded(
        service, about("A"), about("A"), about("B"), about("A", *answered), words
    )
    assert one == same != other
    assert (one.namespace, one.tokens) == ((BEGINNING, *NS), None)
    assert one.key[: one.begins * 4] == one.known.key == other.known.key == longer.known.key
    assert one.known.namespace == text.namespace == ("tokens", *NS)
    assert one.known.tokens == one.begins > 40
    assert text.known is text
    # The same up to the mark at the end of the message, which is there in one of them only.
    assert text.key.startswith(one.known.key)
    assert own_tokenizer.decode(list(memoryview(one.known.key).cast("i"))).endswith("Which plant is this? ")
    assert longer.key.startswith(one.key)


async def test_a_template_that_puts_pictures_in_front(service, own_tokenizer) -> None:  # noqa: F811
    """Then no word before the picture is known to be before it."""
    own_tokenizer.chat_template = IN_FRONT + chat_template(vision=True)
    service.tokenizer = PromptTokenizer(own_tokenizer, FACTS, TokenCache(1 << 20))
    one, other = await encoded(service, about("A"), about("B"))
    assert one.begins == 0
    assert one.key != other.key


async def test_a_server_that_adds_special_tokens_of_its_own_is_matched_by_text(own_tokenizer) -> None:  # noqa: F811
    bos = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    from tokenizers.processors import TemplateProcessing

    own_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos['id']} $A", special_tokens=[(bos["id"], 0)]
    )
    own_tokenizer.chat_template = chat_template(vision=True)
    for multimodal in (True, False):
        facts = replace(FACTS, chat=ChatFacts(multimodal=multimodal))
        found = PromptTokenizer(own_tokenizer, facts, TokenCache(1 << 20)).by_server_only
        assert (found is None) == (not multimodal)


KEY = encode_tokens(range(1000, 1096))
PROMPT = Encoded((BEGINNING, *NS), KEY + b"and then the words behind it, with a digest" * 3, None, 96)


def test_instances_report_what_comes_before_the_picture() -> None:
    index = Index(FakeClock())
    holder, other = Reporter(index, "a"), Reporter(index, "b")
    holder.insert(KEY)
    assert index.match(PROMPT.namespace, PROMPT.key)["a"].tokens == 96
    assert index.match(PROMPT.known.namespace, PROMPT.known.key)["a"].tokens == 96
    # The rest is inferred, also at instances that report: their reports have ids of the picture there.
    index.confirm(PROMPT.namespace, PROMPT.key, "b")
    whole = len(PROMPT.key) // 64 * 16
    assert {name: match.tokens for name, match in index.match(PROMPT.namespace, PROMPT.key).items()} == {
        "a": 96,
        "b": whole,
    }
    assert index.match(("tokens", *NS), PROMPT.key)["a"].tokens == 96
    assert "b" not in index.match(("tokens", *NS), KEY)
    # Those of another tenant never count.
    assert index.match((BEGINNING, None, None, "salt"), PROMPT.key) == {}
    del other


@pytest.mark.parametrize(("end", "is_sent"), [(96, True), (112, False)])
def test_what_comes_before_the_picture_is_fetched_and_no_more(end: int, is_sent: bool) -> None:
    channels = Channels()
    decision = Decision("a", Reason.FETCH, fetch=(Fetch("b", end),))
    carried_out(fetching(channels), decision, FLEET, {"b": Match(end)}, [PROMPT])
    assert [name for name, _ in channels.sent] == (["b", "a"] if is_sent else [])
    for _, message in channels.sent:
        assert message.tokens == KEY  # type: ignore[union-attr]


def test_text_behind_a_picture_counts_where_what_is_before_it_is_reported() -> None:
    index = Index(FakeClock())
    holder, _ = Reporter(index, "a"), Reporter(index, "b")
    holder.insert(KEY)
    whole = len(PROMPT.key) // 64 * 16
    for name in "abc":  # the last does not report
        index.confirm(PROMPT.namespace, PROMPT.key, name)
    assert {name: match.tokens for name, match in matches_of(index, PROMPT).items()} == {
        "a": whole,
        "b": 0,
        "c": whole,
    }
