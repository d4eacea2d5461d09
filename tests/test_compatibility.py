"""Instances that can hand requests over, or share KV, by their registrations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.protocol.cluster import MAX_BODY_BYTES, Difference, Registration, decode, encode
from sglang_ext.protocol.compatibility import (
    MOST_SETTINGS,
    REST,
    bounded,
    differences,
    fits,
    hand_over_identity,
    identity,
    in_words,
    setting_differences,
)

SETTINGS = {"rope_theta": "10000.0", "layers": "2"}
OTHER = {**SETTINGS, "rope_theta": "654321.0"}
ROPE = Difference("rope_theta", "10000.0", "654321.0")
HANDOVER = {"--page-size": "16", "--kv-transfer-mode": "pull"}


def registration(name: str = "a", **more: Any) -> Registration:
    fields = {"url": f"http://127.0.0.1:{1 + ord(name[0])}", "epoch": "0" * 32, "model": "m", **more}
    return Registration(instance=name, **fields)


def half(role: str, **more: Any) -> Registration:
    return registration(role, **{"role": role, "settings": SETTINGS, "handover": HANDOVER, **more})


def shares(name: str, **more: Any) -> Registration:
    fields = {"settings": SETTINGS, "namespace": "n", "weights": "w", "endpoints": ("h:1",), **more}
    return registration(name, **fields)


def test_differences_have_both_values() -> None:
    ours = {"a": "1", "b": "2", "c": "3", "d": "4"}
    assert setting_differences(ours, dict(ours)) == ()
    found = setting_differences({**ours, "a": "9"}, ours)
    assert in_words(found, "there", "here") == "a (9 there, 1 here)"
    assert in_words(setting_differences({}, ours), "there", "here") == (
        "a (none there, 1 here), b (none there, 2 here), c (none there, 3 here) and 1 more"
    )


def test_halves_of_a_pair_need_one_model_and_one_way_of_handing_over() -> None:
    prefill, decode_ = half("prefill"), half("decode")
    assert differences(prefill, decode_) == ()
    assert differences(prefill, half("decode", settings=OTHER)) == (ROPE,)
    page = half("decode", handover={**HANDOVER, "--page-size": "1"})
    assert differences(prefill, page) == (Difference("--page-size", "16", "1"),)


@pytest.mark.parametrize("more", [{"handover": {}, "settings": {}}, {"weights": "other"}, {"namespace": "x"}])
def test_what_is_not_known_or_may_change_is_no_obstacle_to_a_pair(more: Any) -> None:
    """An older instance registers without settings; weights are updated in place."""
    prefill, decode_ = half("prefill"), half("decode", **more)
    assert differences(prefill, decode_) == ()
    assert fits(hand_over_identity(prefill), hand_over_identity(decode_))


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, ()),
        ({"settings": OTHER, "namespace": "x"}, (ROPE,)),
        ({"weights": "v", "namespace": "x"}, (Difference("weights", "w", "v"),)),
        ({"block_size": 32}, (Difference("--kv-block-size", "16", "32"),)),
        ({"endpoints": ("h:1", "h:2"), "namespace": "x"}, (Difference("--tp-size", "1", "2"),)),
        ({"namespace": "x"}, (Difference("KV identity", "n", "x"),)),
        ({"namespace": "x", "settings": {}, "weights": ""}, (Difference("KV identity", "n", "x"),)),
        ({"endpoints": (), "namespace": "x", "weights": "", "block_size": 32}, ()),
        ({"endpoints": (), "settings": OTHER}, (ROPE,)),
        ({"model": "another", "settings": OTHER, "namespace": "x"}, ()),
        ({"role": "prefill", "namespace": "x"}, ()),
    ],
)
def test_colocated_instances_of_one_name_need_one_identity_to_share(
    more: Any, found: tuple[Difference, ...]
) -> None:
    assert differences(shares("a"), shares("b", **more)) == found


VALUES = st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from(["1", "2"]))


@given(st.builds(half, st.just("prefill"), settings=VALUES, handover=VALUES),
       st.builds(half, st.just("decode"), settings=VALUES, handover=VALUES))  # fmt: skip
def test_a_pair_fits_by_its_identities_when_nothing_differs(one: Registration, other: Registration) -> None:
    assert fits(hand_over_identity(one), hand_over_identity(other)) == (not differences(one, other))


def test_like_instances_have_one_identity() -> None:
    assert identity(shares("a")) == identity(shares("b", settings=dict(reversed(SETTINGS.items()))))
    assert identity(shares("a")) != identity(shares("b", settings=OTHER))
    assert hand_over_identity(registration("a", settings=SETTINGS)) == hand_over_identity(None) == ""


def test_settings_are_bounded_and_the_rest_counts() -> None:
    assert bounded(SETTINGS) == SETTINGS
    many = {f"s{number:04}": "x" * 100 for number in range(1000)}
    short = bounded(many)
    assert len(short) <= MOST_SETTINGS + 1
    assert REST in short
    said = encode(registration(settings=short))
    assert len(said) < MAX_BODY_BYTES
    assert decode(said, Registration).settings == short
    (found,) = setting_differences(short, bounded({**many, "s0999": "y"}))
    assert found.setting == REST
    assert bounded({"n" * 200: "1"}).keys() == {REST}


def test_an_older_instance_registers_without_settings() -> None:
    fields = msgspec.to_builtins(registration())
    old = {name: value for name, value in fields.items() if name not in ("settings", "handover", "weights")}
    assert decode(msgspec.json.encode(old), Registration) == registration()
