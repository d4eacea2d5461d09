"""One word for one thing: names that the glossary's words have replaced do not come back."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang_ext", "router", "patches")

RETIRED = {
    "HbmRoom": "HbmTier",
    "Giving": "SenderState",
    "GivingRooms": "PrefillSender",
    "Hinted": "Retention",
    "Inbox": "RankCommandQueue",
    "Lend": "Export",
    "Lending": "Exports",
    "ReturnGiver": "ReturnSender",
    "ReturnTaker": "ReturnReceiver",
    "Room": "SendingHandover",
    "Row": "InstanceRecord",
    "Seam": "StreamSplice",
    "Spread": "LocalHistogram",
    "StraightLoads": "DirectLoads",
    "Taking": "ReceiverState",
    "TakingRoom": "ReceivingHandover",
    "TakingRooms": "DecodeReceiver",
    "Tally": "LocalCounter",
    "Theirs": "ServerTokenizer",
    "CacheLifecycle": "RankCache",
    "WholeCache": "RankCache",
    "agree": "Ranks.each_pass",
    "min_over_ranks": "Ranks.each_pass",
    "nonsense": "invalid_reason",
    "obey": "handle_command",
    "room": "handover or reservation",
    "rooms": "handovers or reservations",
}
"""Retired name -> the name of today."""
MODULES = {
    "exchange": "types",
    "hbm_room": "hbm_tier",
    "hinted": "retention",
    "lending": "export",
    "pd_giving": "prefill_sender",
    "pd_places": "reservations",
    "pd_returns": "kv_writeback",
    "pd_taking": "decode_receiver",
    "row": "instance_record",
    "seam": "stream_splice",
    "straight_loads": "direct_loads",
    "tally": "local_metrics",
    "trial": "tokenizer_check",
    "whole_cache": "rank_cache",
}
"""The same of modules."""


def retired(source: str) -> Iterator[str]:
    """Retired names among the identifiers of a module: prose may agree, code has `Ranks`."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in RETIRED:
            yield f"{token.start[0]}: {token.string} is {RETIRED[token.string]} now"


def test_no_retired_word_is_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in retired(path.read_text("utf-8"))
    ]
    assert not found
    names = {path.stem for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not names & set(MODULES)


@pytest.mark.parametrize(
    ("source", "count"),
    [("def f(agree):\n    return agree(1)\n", 2), ('"""We agree, in a Row."""\n', 0), ("rows = Row()\n", 1)],
)
def test_a_retired_word_is_found(source: str, count: int) -> None:
    assert len(list(retired(source))) == count
