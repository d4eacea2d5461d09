"""Members that can never work together, in groups: each group is compared and named once."""

from __future__ import annotations

import logging
import random

import msgspec
import pytest

from sglang_ext.protocol.cluster import Registration, encode
from sglang_ext.protocol.compatibility import MOST_FINDINGS, MOST_INSTANCES, differences
from sglang_ext.router.fleet import compatibility as module
from sglang_ext.router.fleet.compatibility import Compatibility


def member(name: str, theta: int = 1, role: str = "colocated", **more: object) -> Registration:
    fields = {"url": "http://127.0.0.1:1", "epoch": "0" * 32, "model": "m", "namespace": f"of {theta}"}
    settings = {"rope_theta": str(theta)}
    handover = {} if role == "colocated" else {"--page-size": "16"}
    return Registration(
        **{**fields, "instance": name, "role": role, "settings": settings, "handover": handover, **more}
    )


def test_a_thousand_members_of_three_kinds_are_two_findings_and_few_comparisons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "router.members")
    compared = 0

    def counted(one: Registration, other: Registration) -> object:
        nonlocal compared
        compared += 1
        return differences(one, other)

    monkeypatch.setattr(module, "differences", counted)
    thetas = {1: 2, 2: 3}
    members = [member(f"i{number:03}", theta=thetas.get(number % 10, 1)) for number in range(1000)]
    found = Compatibility()
    for each in members:
        found.put(each)
    assert repr(found) == "Compatibility(3 groups, 2 incompatible)"
    assert compared < 4 * len(members)
    assert [(each.count, each.others_count) for each in found.findings] == [(100, 800), (100, 800)]
    first = found.findings[0]
    assert len(first.instances) == len(first.others) == MOST_INSTANCES
    assert first.why.startswith(
        "i001, i011, i021 and 97 more cannot share KV with i000, i003, i004 and 797 more: "
        "rope_theta (2 at i001, 1 at i000); "
    )
    assert len(caplog.records) <= 3, "the largest group may have changed once"
    for each in members:
        found.drop(each.instance)
    assert repr(found) == "Compatibility(0 groups, 0 incompatible)"


def test_what_is_found_is_bounded() -> None:
    found = Compatibility()
    for number in range(4 * MOST_FINDINGS):
        found.put(member(f"i{number}", theta=number))
    assert len(found.findings) == MOST_FINDINGS


def test_groups_of_halves_are_named_with_those_that_they_do_not_fit() -> None:
    found = Compatibility()
    found.put(member("p", 1, "prefill"))
    for name, theta in (("d", 1), ("e", 2), ("f", 2)):
        found.put(member(name, theta, "decode"))
    found.put(member("old", role="prefill", settings={}, handover={}))
    (each,) = found.findings
    assert (each.what, each.instances, each.others) == ("hand-over", ("p",), ("e", "f"))
    assert "p (prefill) and e, f (decode)" in each.why
    assert "rope_theta (1 at prefill, 2 at decode)" in each.why
    found.put(member("p", 2, "prefill"))  # it was started otherwise
    assert [each.others for each in found.findings] == [("d",)]


def test_like_members_keep_their_settings_once() -> None:
    found = Compatibility()
    first, second = (msgspec.json.decode(encode(member(name)), type=Registration) for name in "ab")
    found.put(first)
    shared = found.shared(second)
    assert shared == second
    assert shared.settings is first.settings
    assert found.shared(member("c", 2)).settings == {"rope_theta": "2"}


def test_the_same_is_found_in_whatever_order_they_come() -> None:
    members = [member(f"i{number}", theta=1 + number // 4) for number in range(10)]
    told = set()
    for seed in range(5):
        random.Random(seed).shuffle(members)
        found = Compatibility()
        for each in members:
            found.put(each)
        told.add(tuple(each.why for each in found.findings))
    assert len(told) == 1
