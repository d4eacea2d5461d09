"""The tokenizer of the tiny models: any text comes back, a conversation's turns extend each other."""

from __future__ import annotations

import json
import lzma
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer

from sglang_ext.testing.tokenizer import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    chat_template,
    emitted_ids,
    tokenizer_json,
    vocabulary,
    write_tokenizer,
)
from tests.support import vocabulary_training

Message = dict[str, str]


@cache
def shared() -> Tokenizer:
    """For tests whose examples hypothesis makes, which cannot take a fixture of each example."""
    return Tokenizer.from_str(json.dumps(tokenizer_json()))


ENGLISH = (
    "Please summarise the following document, then answer: what did Mr. O'Brien say in 1998?\n\n"
    '  He said that it\'s 37.5% cheaper -- "as far as we know" (see https://example.org/a_b?c=d).\n'
)
CHINESE = (
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u8bf7\u95ee\u4eca\u5929\u7684\u5929\u6c14\u600e\u4e48\u6837\uff1f"
    "\u6211\u4eec\u5728\u5b66\u4e60\u5982\u4f55\u5171\u4eab\u7f13\u5b58\u3002"
)
MIXED = (
    "caf\u00e9 na\u00efve \u2014 \u03b1\u03b2\u03b3 \U0001f642\U0001f1e9\U0001f1ea \u0000\r\n\t "
    "\u9fa5\U00020000"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 1024)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def prompt(messages: list[Message], *, answer_next: bool) -> str:
    template = Environment(autoescape=False).from_string(chat_template())
    return template.render(messages=messages, add_generation_prompt=answer_next)


def test_the_vocabulary_is_as_large_as_the_models(tokenizer: Tokenizer) -> None:
    entries, merges = vocabulary()
    assert len(entries) == tokenizer.get_vocab_size() == VOCAB_SIZE
    assert all(left in entries and right in entries for left, right in random.Random(0).sample(merges, 200))
    assert [entries[BOS_TOKEN_ID], entries[EOS_TOKEN_ID]] == ["<|endoftext|>", "<|im_end|>"]
    for index, token in enumerate(SPECIAL_TOKENS):
        assert encode(tokenizer, f"a{token}b")[1:-1] == [index]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, MIXED, "", " ", "\n\n\n", "   x"], ids=repr)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert decode(tokenizer, encode(tokenizer, text)) == text


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = shared()
    assert decode(tokenizer, encode(tokenizer, text)) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_any_ids_can_be_decoded(ids: list[int]) -> None:
    assert isinstance(decode(shared(), ids), str)


def test_real_text_is_not_cut_into_bytes(tokenizer: Tokenizer) -> None:
    assert len(ENGLISH) / len(encode(tokenizer, ENGLISH)) > 2.5
    assert len(encode(tokenizer, CHINESE)) == len(CHINESE)


@given(st.lists(st.sampled_from(emitted_ids()), min_size=1, max_size=100))
def test_what_a_model_answers_comes_back_as_the_same_ids(ids: list[int]) -> None:
    tokenizer = shared()
    assert encode(tokenizer, decode(tokenizer, ids)) == ids


def test_most_entries_may_be_answered() -> None:
    assert len(emitted_ids()) > 0.6 * VOCAB_SIZE


@pytest.mark.parametrize("token", ["ing", "\n", "<|im_end|>"])
def test_what_is_no_whole_word_is_not_counted_on(tokenizer: Tokenizer, token: str) -> None:
    """The twin: with these at hand, answers would not come back."""
    (index,) = encode(tokenizer, token)
    assert index not in emitted_ids()


def test_an_answer_of_fragments_comes_back_as_other_ids(tokenizer: Tokenizer) -> None:
    (walk,), (ing,) = encode(tokenizer, " work"), encode(tokenizer, "ing")
    assert encode(tokenizer, decode(tokenizer, [walk, ing])) != [walk, ing]


contents = st.text(max_size=40) | st.sampled_from([ENGLISH, CHINESE, "\n", "\n \n", " ", "x\n"])


@given(st.none() | contents, st.lists(st.tuples(contents, contents), min_size=1, max_size=4))
def test_each_turn_of_a_conversation_extends_the_one_before(
    system: str | None, turns: list[tuple[str, str]]
) -> None:
    tokenizer = shared()
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    before: list[int] = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        ids = encode(tokenizer, prompt(messages, answer_next=True))
        assert ids[: len(before)] == before
        assert len(ids) > len(before)
        messages.append({"role": "assistant", "content": answer})
        whole = encode(tokenizer, prompt(messages, answer_next=False))
        # Prompt, answer and end of the message, each as if it stood alone.
        assert whole[: len(ids)] == ids
        before = ids + encode(tokenizer, answer)
        assert whole[: len(before)] == before
        assert whole[len(before) :] == encode(tokenizer, "<|im_end|>\n")
        before = whole


def test_the_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt(messages, answer_next=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_transformers_reads_it_all(tmp_path: Path) -> None:
    from sglang_ext.patches.cpu import torchvision

    torchvision.apply()
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, 2048)
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == VOCAB_SIZE
    assert loaded.model_max_length == 2048
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 2, 0)
    for text in (ENGLISH, CHINESE, MIXED):
        assert loaded.encode(text) == encode(shared(), text)
        assert loaded.decode(loaded.encode(text)) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == prompt(
        messages, answer_next=True
    )


def test_a_changed_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vocabulary.txt.xz").write_bytes(lzma.compress("a b\n\u0120word\n".encode()))
    monkeypatch.setattr("sglang_ext.testing.tokenizer._STATIC", tmp_path)
    with pytest.raises(ValueError, match=r"261 entries, 261 distinct, not 32000.*restore it"):
        vocabulary.__wrapped__()


@pytest.mark.long
def test_training_gives_a_vocabulary_of_the_right_size() -> None:
    lines = vocabulary_training.train()
    assert len(SPECIAL_TOKENS) + 256 + len(lines) == VOCAB_SIZE
    assert len(set(lines)) == len(lines)
    assert all(re.fullmatch(r"\S+( \S+)?", line) for line in lines)
