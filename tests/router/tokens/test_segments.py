"""Where texts may be cut for tokenizing: between words, by tokenizers built as the well-known ones are."""

from __future__ import annotations

import inspect
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from sglang_ext.keys import decode_tokens
from sglang_ext.router.tokens.segments import PIECE, SEARCHED, Segmenter, TokenCache

pytestmark = pytest.mark.slow

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    inspect.getsource(random),
    inspect.getsource(textwrap),
    "你好。世界很大。今天天气很好。我们去公园。\n在那里有很多人。" * 20,
    "Der Bär fährt über die Brücke. Привет, как дела? it's I'm don't 123 4567\n\n" * 20,
]


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _trained(before: pre_tokenizers.PreTokenizer | None, normalizer: object = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=before is None, unk_token="<unk>"))
    if before is not None:
        tokenizer.pre_tokenizer = before
        tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if before is not None else []
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _with_a_blank_in_front() -> Tokenizer:
    """As Llama 2's, whose vocabulary has no entry that spans words."""
    tokenizer = CUT["Metaspace"]()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), BLANKS])
    return tokenizer


BLANKS = normalizers.Replace(" ", "▁")
CUT: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": lambda: _trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Llama 3": lambda: _trained(_split(LLAMA_3)),
    "Qwen": lambda: _trained(_split(LLAMA_3), normalizers.NFC()),
    "o200k": lambda: _trained(_split(O200K)),
    "DeepSeek V3": lambda: _trained(
        _split(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK_V3)
    ),
    "Metaspace": lambda: _trained(pre_tokenizers.Metaspace(prepend_scheme="never")),
}
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "a blank in front of every input": _with_a_blank_in_front,
    "tokens of several words": lambda: _trained(None, BLANKS),
    "lines with their white space": lambda: _trained(_split(r"[^\n]*\n[^\W\d_]*|[^\n]+")),
}


def _segmenter(tokenizer: Tokenizer, asked: list[str] | None = None, piece: int = PIECE) -> Segmenter:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        if asked is not None:
            asked.extend(texts)
        return [each.ids for each in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return Segmenter(encode, [], vocabulary, TokenCache(1 << 24), piece=piece)


@pytest.fixture(scope="module", params=CUT)
def cut(request: pytest.FixtureRequest) -> tuple[Tokenizer, Segmenter]:
    tokenizer = CUT[request.param]()
    segmenter = _segmenter(tokenizer, piece=3)
    assert segmenter.by_piece
    return tokenizer, segmenter


PARTS = [
    "a b",
    " the",
    "\n",
    "x\ny",
    "。\n好",
    " 你",
    "I'm",
    "12 a",
    "  c",
    "\té\n",
    "_ ",
    "'s t",
    "\n\nb",
    "\r\nd",
]
texts = st.lists(st.one_of(st.text(max_size=6), st.sampled_from(PARTS)), max_size=30).map("".join)


@given(text=texts)
def test_pieces_make_the_tokens_of_the_whole(cut: tuple[Tokenizer, Segmenter], text: str) -> None:
    tokenizer, segmenter = cut
    assert _ids(segmenter, text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", WHOLE)
def test_a_tokenizer_that_looks_beyond_words_is_not_cut(kind: str) -> None:
    tokenizer = WHOLE[kind]()
    segmenter = _segmenter(tokenizer, piece=3)
    assert not segmenter.by_piece
    whole = tokenizer.encode(CORPUS[0], add_special_tokens=False).ids
    assert _ids(segmenter, CORPUS[0]) == whole
    forced = _segmenter(tokenizer, piece=3)
    forced._places = re.compile(r"(?<=\w)(?= \w)|(?<=\n)(?=\w)")  # cuts that it is kept from
    assert _ids(forced, CORPUS[0]) != whole


def test_what_texts_begin_with_alike_is_tokenized_once() -> None:
    asked: list[str] = []
    segmenter = _segmenter(CUT["Llama 3"](), asked)
    document = CORPUS[0][:20_000]
    segmenter.encode(document + "\nWhat does it say?")
    assert max(map(len, asked[-5:])) < 2 * PIECE
    asked.clear()
    segmenter.encode(document + "\nWho wrote it?")
    assert sum(map(len, asked)) < 2 * PIECE
    assert asked[-1].endswith("Who wrote it?")


def test_a_text_without_borders_is_whole() -> None:
    tokenizer = CUT["Llama 3"]()
    text = "x" * 5 * PIECE
    assert _ids(_segmenter(tokenizer), text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(_segmenter(tokenizer)._cut(text)) == text


def test_borders_are_searched_for_in_a_part_of_a_text_only() -> None:
    """Texts without borders, or with few, cost little more than others, and have the same tokens."""
    tokenizer = CUT["Llama 3"]()
    segmenter = _segmenter(tokenizer)
    stretch = "w1 " * (SEARCHED // 3)
    mixed = stretch[: SEARCHED // 2] + "and so on " + stretch + "some words then " * PIECE
    for text in (stretch * 3, mixed, CORPUS[0] + stretch + CORPUS[1]):
        assert _ids(segmenter, text) == tokenizer.encode(text, add_special_tokens=False).ids
    searched = 0

    class Places:
        """Counts the characters that are searched."""

        def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
            nonlocal searched
            assert places is not None
            found = places.search(text, start, end)
            searched += (end if found is None else found.start()) - start
            return found

    places = segmenter._places
    segmenter._places = cast("re.Pattern[str]", Places())
    assert len(segmenter._cut(stretch * 20)) == 1
    assert searched <= len(stretch) * 20 / 4
    searched = 0
    prose = "and some more words " * 10_000
    assert len(segmenter._cut(prose)) > len(prose) / PIECE * 0.9
    assert searched < len(prose) / 100


def _ids(segmenter: Segmenter, text: str) -> list[int]:
    return [int(token) for token in decode_tokens(segmenter.encode(text))]
