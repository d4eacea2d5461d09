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
    GROUP_TOKENS,
    MAX_TOKEN,
    MAX_WIDE_ID,
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
        ("q", -(2**63)),
        ("q", -(2**32)),
        ("i", -1),
        ("b", -1),
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
        with pytest.raises(ValueError, match=r"token ids must lie in \[0, 9223372036854775807\]"):
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


# -- wide ids ---------------------------------------------------------------------------------------

WIDE = st.integers(MAX_TOKEN + 1, MAX_WIDE_ID)
MIXED = st.lists(st.one_of(st.integers(0, MAX_TOKEN), WIDE, st.sampled_from([2**31, 2**62 + 1, MAX_WIDE_ID])))


@hypothesis.given(MIXED)
def test_a_word_for_each_token_and_every_group_stands_alone(tokens: list[int]) -> None:
    encoded = encode_tokens(array("q", tokens))
    assert encoded == encode_tokens(tokens) == encode_tokens(np.array(tokens, np.int64))
    assert len(encoded) == len(tokens) * TOKEN_BYTES
    for start in range(0, len(tokens), GROUP_TOKENS):
        group = tokens[start : start + GROUP_TOKENS]
        words = decode_tokens(encoded)[start : start + GROUP_TOKENS]
        assert words.tobytes() == encode_tokens(array("q", group))
        # So the first blocks of a prompt are the first bytes of its encoding.
        assert encode_tokens(tokens, start) == encoded[: start * TOKEN_BYTES]
        if max(group) <= MAX_TOKEN:
            assert words.tolist() == group
        else:
            assert (words < 0).all(), "a group of text could be the same"


@hypothesis.given(st.lists(WIDE, min_size=1, max_size=20), st.data())
def test_each_bit_of_a_wide_id_counts(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    bit = data.draw(st.integers(0, 62))
    other = list(tokens)
    other[at] ^= 1 << bit
    # A group that is not complete is in no block.
    fill = [7] * (-len(tokens) % GROUP_TOKENS)
    group = slice(at // GROUP_TOKENS * GROUP_TOKENS, (at // GROUP_TOKENS + 1) * GROUP_TOKENS)
    first, second = (decode_tokens(encode_tokens([*each, *fill])) for each in (tokens, other))
    assert first[group].tolist() != second[group].tolist()
    assert np.count_nonzero(first != second) <= GROUP_TOKENS


def test_pictures_that_agree_in_31_bits_have_no_word_in_common() -> None:
    """Their ids, cut to a word, would be the same."""
    one, other = ([5 + (high << 31)] * 32 for high in (1, 2))
    first, second = (decode_tokens(encode_tokens(array("q", ids))) for ids in (one, other))
    assert not (first == second).any()


def test_a_block_with_the_first_token_of_a_picture_is_not_another_ones() -> None:
    """At the end of a block, one id of the picture has 124 bits of digest to itself."""
    found = {encode_tokens([*range(15), 2**40 + (number << 31)]) for number in range(1000)}
    assert len({key[-GROUP_TOKENS * TOKEN_BYTES :] for key in found}) == 1000
    assert len({key[: -GROUP_TOKENS * TOKEN_BYTES] for key in found}) == 1


def test_many_ids_that_repeat_are_encoded_like_each_alone() -> None:
    """SGLang from 0.5.23 on repeats four ids over a picture, before it one."""
    for repeated in ([2**40], [2**61 + n for n in range(4)], [2**61 + n for n in range(3)]):
        tokens = [1, 2, 3, *(repeated * 30)[:70], 4, 5]
        alone = b"".join(
            encode_tokens(tokens[at : at + GROUP_TOKENS]) for at in range(0, len(tokens), GROUP_TOKENS)
        )
        assert encode_tokens(array("q", tokens)) == alone


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


def test_names_of_text_are_those_of_the_disks_that_are_there() -> None:
    """A disk tier finds its blocks by these names: they were taken down before there were wide ids."""
    assert [key.hex() for key in block_keys(SPACE, encode_tokens([*range(30), MAX_TOKEN, 7]), 16)] == [
        "296bac1e323a9d76aa5b9d9f618c5541",
        "4fed349af48a8fcba4eeb40032a127f0",
    ]
    # And from now on, those of a picture.
    assert [key.hex() for key in block_keys(SPACE, encode_tokens([*range(8), *[2**61 + 5] * 8]), 16)] == [
        "9a28e597be85fbfb04af75cd41dd1dd7"
    ]


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
