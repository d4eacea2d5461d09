"""Token keys, namespaces and block keys."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sglang_ext.keys import (
    BLOCK_KEY_BYTES,
    MAX_TOKEN,
    TOKEN_BYTES,
    Namespace,
    block_keys,
    decode_tokens,
    encode_tokens,
)
from sglang_ext.tiers import Tier

TOKENS = [0, 1, 255, 256, 65_535, 65_536, 128_255, MAX_TOKEN]
SMALL = [0, 1, 2, 127]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        range(8),
        *(array(code, TOKENS) for code in "qlQLiI"),
        *(array(code, SMALL) for code in "bBhH"),
        *(np.array(TOKENS, dtype) for dtype in (np.int64, np.uint64, np.int32, np.uint32, ">i8", "<i4")),
        *(np.array(SMALL, dtype) for dtype in (np.int8, np.uint8, np.int16, np.uint16)),
        np.array(TOKENS * 2)[::2],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'typecode', getattr(tokens, 'dtype', ''))}",
)
def test_encoding_is_little_endian_int32_whatever_the_tokens_come_in(tokens: Any) -> None:
    encoded = encode_tokens(tokens)
    assert encoded == b"".join(int(token).to_bytes(TOKEN_BYTES, "little") for token in tokens)
    assert decode_tokens(encoded).tolist() == [int(token) for token in tokens]
    assert encode_tokens(encoded) is encoded


@pytest.mark.parametrize("nothing", [[], (), array("q"), array("i"), np.array([], np.int64), b""])
def test_no_tokens_are_no_bytes(nothing: Any) -> None:
    assert encode_tokens(nothing) == b""
    assert decode_tokens(b"").tolist() == []


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 100])
@pytest.mark.parametrize("form", [list, tuple, lambda t: array("q", t), lambda t: array("i", t), np.array])
def test_the_first_so_many(form: Any, count: int) -> None:
    tokens = [5, 4, 3, 2, 1, 0]
    assert encode_tokens(form(tokens), count) == encode_tokens(tokens[:count])
    assert encode_tokens(encode_tokens(tokens), count) == encode_tokens(tokens[:count])
    wrong_behind = form([*tokens, -1])
    if count < 7:
        assert encode_tokens(wrong_behind, count) == encode_tokens(tokens[:count])
    with pytest.raises(ValueError, match="must lie in"):
        encode_tokens(wrong_behind)


@hypothesis.given(st.lists(st.integers(0, MAX_TOKEN)))
def test_round_trip(tokens: list[int]) -> None:
    encoded = encode_tokens(array("q", tokens))
    assert encoded == encode_tokens(tokens) == encode_tokens(np.array(tokens, np.int64))
    assert decode_tokens(encoded).tolist() == tokens


@pytest.mark.parametrize("place", [0, 3, -1])
@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("q", -1),
        ("q", MAX_TOKEN + 1),
        ("q", 2**32 + 5),
        ("q", -(2**63)),
        ("q", -(2**32)),
        ("i", -1),
        ("b", -1),
        ("I", MAX_TOKEN + 1),
        ("Q", 2**64 - 1),
        ("Q", 2**63),
    ],
)
def test_ids_out_of_range_are_refused(code: str, bad: int, place: int) -> None:
    tokens = array(code, [1, 2, 3, 4, 5, 6])
    tokens[place] = bad
    forms: list[Any] = [tokens, np.array(tokens)]
    if bad < 2**63:  # numpy makes floats of a list of such numbers, which is refused as that
        forms.append(list(tokens))
    for form in forms:
        with pytest.raises(ValueError, match=r"token ids must lie in \[0, 2147483647\]"):
            encode_tokens(form)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        np.array([1.5]),
        ["a"],
        [None],
        [2**70],
        np.array([[1, 2], [3, 4]]),
        [[1], [2]],
        array("d", [1.0]),
        np.array([True]),
    ],
    ids=repr,
)
def test_what_is_not_a_row_of_integers_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token ids must be one row of integers"):
        encode_tokens(tokens)


def test_decoding_makes_no_copy() -> None:
    encoded = encode_tokens([1, 2, 3])
    decoded = decode_tokens(encoded)
    assert (decoded.base is not None, decoded.flags.writeable, decoded.dtype) == (True, False, np.int32)


# -- namespaces -------------------------------------------------------------------------------------

HERE = Namespace("model", "v1", "bfloat16", "g" * 32)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Namespace)])
def test_every_field_of_a_namespace_counts(field: str) -> None:
    other = dataclasses.replace(HERE, **{field: getattr(HERE, field) + "x"})
    assert len(HERE.digest()) == BLOCK_KEY_BYTES
    assert other.digest() != HERE.digest()
    assert dataclasses.replace(other, **{field: getattr(HERE, field)}).digest() == HERE.digest()


def test_fields_cannot_flow_into_each_other() -> None:
    words = ["", "a", "b", "ab", "aab", "ba", "\0", "a\0", "\x01\0\0\0a"]
    spaces = [Namespace(m, w, "f", "g", "s", salt) for m, w, salt in itertools.product(words, repeat=3)]
    assert len({space.digest() for space in spaces}) == len(spaces) == len(words) ** 3


# -- block keys -------------------------------------------------------------------------------------

SPACE = HERE.digest()


def test_whole_blocks_have_keys_and_a_tail_has_none() -> None:
    tokens = encode_tokens(range(35))
    keys = block_keys(SPACE, tokens, 16)
    assert [len(key) for key in keys] == [BLOCK_KEY_BYTES] * 2
    assert block_keys(SPACE, encode_tokens(range(32)), 16) == keys
    assert block_keys(SPACE, encode_tokens(range(31)), 16) == keys[:1]
    assert block_keys(SPACE, encode_tokens(range(15)), 16) == block_keys(SPACE, b"", 16) == []


def test_a_chain_goes_on_from_its_parent() -> None:
    tokens = encode_tokens(range(64))
    keys = block_keys(SPACE, tokens, 16)
    for cut in range(1, 4):
        rest = tokens[cut * 16 * TOKEN_BYTES :]
        assert block_keys(SPACE, rest, 16, parent=keys[cut - 1]) == keys[cut:]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("changed", [0, 15, 16, 40, 63])
def test_a_changed_token_changes_its_block_and_all_after_it(changed: int) -> None:
    tokens = list(range(64))
    before = block_keys(SPACE, encode_tokens(tokens), 16)
    tokens[changed] = 1_000
    after = block_keys(SPACE, encode_tokens(tokens), 16)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [True] * (changed // 16) + [False] * (4 - changed // 16)


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    keys = block_keys(SPACE, encode_tokens([7] * 64), 16)
    assert len(set(keys)) == 4


def test_keys_of_another_namespace_differ() -> None:
    tokens = encode_tokens(range(64))
    other = dataclasses.replace(HERE, salt="tenant").digest()
    assert not set(block_keys(SPACE, tokens, 16)) & set(block_keys(other, tokens, 16))


def test_tiers_are_ordered_by_distance() -> None:
    assert sorted((Tier.DISK, Tier.DRAM, Tier.HBM)) == [Tier.HBM, Tier.DRAM, Tier.DISK]
