"""Pads of pictures: wide ids in every version of SGLang, and an SGLang with wider ones is refused."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.keys import MAX_TOKEN, MAX_WIDE_ID, encode_tokens
from sglang_ext.patches.contract import pads
from sglang_ext.patches.contract.places import NoSourceError, check_contract, folder_of, sglang_folder
from sglang_ext.patches.contract.source import Source
from sglang_ext.patches.hooks.wide_pads import after_pad, around_pad, wide_pad
from sglang_ext.patches.versions import SUPPORTED

LARGEST = {"0.5.21": 10**6 + 2**30 - 1, "0.5.22": 10**6 + 2**30 - 1, "0.5.23": 10**6 + 2**62 - 1}


@pytest.mark.parametrize("version", [each.version for each in SUPPORTED])
def test_how_wide_pads_are_in_each_version(version: str) -> None:
    try:
        source = Source({"sglang": sglang_folder(version)})
    except NoSourceError as error:
        pytest.skip(str(error))
    assert pads.largest_pad(source) == LARGEST[version]
    assert pads.problem(source) == ""


def schedule_batch(folder: Path, text: str) -> Source:
    managers = folder / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    (managers / "schedule_batch.py").write_text(text)
    return Source({"sglang": folder / "sglang"})


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("MM_PAD_SHIFT_VALUE + (hash & MASK)", f"pads are up to {2**64 - 1 + 1000}, above {MAX_WIDE_ID}"),
        (
            "MM_PAD_SHIFT_VALUE + (hash % (1 << 63))",
            f"pads are up to {2**63 - 1 + 1000}, above {MAX_WIDE_ID}",
        ),
        ("MM_PAD_SHIFT_VALUE + (hash % (1 << 62))", ""),
        ("pad_of(hash)", "no expression MM_PAD_SHIFT_VALUE + (hash & mask) says how wide pads are"),
    ],
)
def test_what_would_end_each_scheduler_at_a_picture_is_named(tmp_path: Path, made: str, problem: str) -> None:
    constants = "MM_PAD_SHIFT_VALUE = 1_000\nMASK = (1 << 64) - 1\n"
    assert pads.problem(schedule_batch(tmp_path, f"{constants}def f(hash):\n    return {made}\n")) == problem


def test_the_contract_has_it() -> None:
    assert not [each for each in check_contract(folder_of("sglang")).broken if "PAD" in each.need]


def item(content_hash: int | None, pad_value: int | None) -> Any:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    return MultimodalDataItem(modality=Modality.IMAGE, hash=content_hash, pad_value=pad_value)


@pytest.mark.parametrize("content_hash", [0, 5, 5 + 2**30, 2**63, 2**64 - 1])
def test_a_narrow_pad_is_made_of_the_whole_hash(content_hash: int) -> None:
    made = item(content_hash, 10**6 + content_hash % 2**30)
    after_pad(None, made)
    assert made.pad_value == wide_pad(content_hash)
    assert MAX_TOKEN < made.pad_value <= MAX_WIDE_ID
    again = made.pad_value
    after_pad(None, made)
    assert made.pad_value == again


def test_hashes_that_agree_in_thirty_bits_have_other_pads() -> None:
    hashes = [5 + (high << 30) for high in range(1000)]
    assert len({wide_pad(each) for each in hashes}) == len(hashes)
    # The same in each process, version and machine: KV on disk is found by it.
    assert wide_pad(5) == 2638151422016878886


def test_a_wide_pad_and_none_stay() -> None:
    for made in (item(5, 2**61 + 3), item(5, None), item(None, 77)):
        before = made.pad_value
        after_pad(None, made)
        assert made.pad_value == before


@pytest.mark.parametrize("kind", ["IMAGE", "VIDEO", "AUDIO"])
def test_content_of_one_length_is_told_apart_by_its_pads(kind: str) -> None:
    """SGLang's own hash and padding, with our hook after it, for features of one shape."""
    import torch
    from sglang.srt.managers.mm_utils import pad_mm_tokens
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

    placeholder, words = 7, array("q", [1, 2, 3])

    def encoded(seed: int) -> bytes:
        feature = torch.randn(48, 6, generator=torch.Generator().manual_seed(seed))
        made = MultimodalDataItem(modality=Modality[kind], feature=feature, offsets=[(3, 14)])
        around_pad(MultimodalDataItem.set_pad_value, made)
        inputs = MultimodalInputs(
            mm_items=[made],
            im_token_id=placeholder,
            video_token_id=placeholder,
            audio_token_id=placeholder,
        )
        return encode_tokens(pad_mm_tokens(words + array("q", [placeholder] * 12) + words, inputs))

    one, same, other = encoded(1), encoded(1), encoded(2)
    assert one == same
    assert len(one) == len(other) == 4 * (3 + 12 + 3)
    # Every aligned group with a pad among its ids differs, and words that share a group with one.
    differing = {at // 16 for at in range(len(one)) if one[at] != other[at]}
    assert differing == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("image_grid_thw", [[1, 2, 8]], [[1, 8, 2]]),
        ("video_grid_thw", [[2, 2, 4]], [[2, 4, 2]]),
        ("second_per_grid_ts", [1.0], [0.5]),
    ],
)
def test_the_same_values_in_another_shape_are_another_content(name: str, one: Any, other: Any) -> None:
    """Positions of the tokens, and so their KV, depend on the grid and on the times of frames."""
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    def padded(shape: Any) -> Any:
        made = MultimodalDataItem(modality=Modality.VIDEO, feature=torch.ones(16, 6))
        made.set(name, torch.tensor(shape))
        around_pad(MultimodalDataItem.set_pad_value, made)
        return made

    first, same, second = padded(one), padded(one), padded(other)
    assert first.pad_value == same.pad_value != second.pad_value
    assert first.hash != second.hash
    # Again, as in the scheduler's process: the pad stays.
    again = first.pad_value
    around_pad(MultimodalDataItem.set_pad_value, first)
    assert first.pad_value == again
    # The twin: SGLang's own.
    for made in (first, second):
        made.pad_value = made.hash = None
        MultimodalDataItem.set_pad_value(made)
    assert first.pad_value == second.pad_value
