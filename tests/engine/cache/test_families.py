"""``admission`` refuses exactly the features that the table of families lacks. Each test in it exists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.patches.adapter.admission import Facts, unsupported
from sglang_ext.patches.adapter.families import COLUMNS, TABLE, Column, Family, Proof, family_of

TESTS = Path(__file__).parents[2]
PLAIN: dict[str, bool] = dict.fromkeys(("latent", "experts", "windows", "whole_windows", "embeds"), False)
KEPT: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "gqa": ({}, {}),
    "gqa-moe": ({}, {"experts": True}),
    "mla": ({"kv_pool": "MLATokenToKVPool"}, {"latent": True}),
    "mla-moe": ({"kv_pool": "MLATokenToKVPool"}, {"latent": True, "experts": True}),
    "window-kept": ({}, {"windows": True}),
    "window-flag": ({}, {"windows": True, "experts": True, "whole_windows": True}),
    "vision": ({"is_multimodal": True}, {}),
    "vision-mla": ({"is_multimodal": True, "kv_pool": "MLATokenToKVPool"}, {"latent": True}),
    "embedding": ({}, {"embeds": True}),
    "encoder": ({"is_bidirectional": True}, {"embeds": True}),
    "window": ({"is_hybrid_swa": True}, {"windows": True}),
    "dsa": ({"is_dsa": True, "kv_pool": "DSATokenToKVPool"}, {"latent": True, "experts": True}),
    "dsa-group": (
        {"is_dsa": True, "index_group": 4, "is_hybrid_ssm": True, "kv_pool": "HybridLinearKVPool"},
        {"latent": True, "experts": True},
    ),
    "state": ({"is_hybrid_ssm": True}, {"experts": True}),
    "dsv4": ({"is_deepseek_v4": True, "is_hybrid_swa": True}, {"experts": True}),
    "msa": ({"is_minimax_sparse": True, "is_multimodal": True}, {"experts": True}),
    "qsa": (
        {"is_qsa": True, "is_hybrid_ssm": True, "is_multimodal": True, "kv_pool": "QSATokenToKVPool"},
        {"experts": True},
    ),
}
"""The facts of a model of each family, and what else tells the family."""
ASKED: dict[Column, dict[str, Any]] = {
    "HBM": {},
    "DRAM": {"dram": True},
    "disk": {"dram": True, "disk": True},
    "fetch": {"dram": True},
    "PD": {"caches": False, "transfers": True},
    "return": {
        "transfers": True,
        "disaggregation_mode": "prefill",
        "decode_keeps": True,
        "returns": True,
        "dram": True,
    },
    "migration": {"dram": True},
    "hints": {"dram": True},
    "speculation": {"speculative_algorithm": "EAGLE"},
    "TP": {"dram": True},
    "DP": {"dp_size": 2},
    "DP attention": {"attn_dp_size": 2},
    "CP": {"dram": True, "disk": True, "attn_cp_size": 2},
    "PP": {"dram": True, "pp_size": 2},
    "DP in PD": {"caches": False, "transfers": True, "dp_size": 2},
    "PP in PD": {"caches": False, "transfers": True, "pp_size": 2, "disaggregation_mode": "decode"},
}
"""The flags with which a server is asked for each column; for the others its model alone decides."""


def test_each_family_is_told_from_the_others() -> None:
    assert KEPT.keys() == TABLE.keys()
    assert ASKED.keys() == set(COLUMNS)
    for name, (facts, also) in KEPT.items():
        assert family_of(Facts(**facts), **PLAIN | also) is TABLE[name], name


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", TABLE)
def test_what_the_table_lacks_is_refused_and_nothing_else(name: str, column: Column) -> None:
    facts = replace(Facts(**KEPT[name][0]), **ASKED[column])
    reason = unsupported(facts)
    assert (reason is None) == (column in TABLE[name].cells), reason
    if reason is not None and not TABLE[name].cells:
        assert TABLE[name].refusal in reason


def missing(proof: Proof) -> str:
    """The missing part of the test of a proof: its file, function or model; empty when the test exists."""
    if proof.kind == "reading":
        return "a test of a reading" if proof.test else ""
    found = re.fullmatch(r"(\S+\.py)::(test_\w+)(?:\[([\w-]+)\])?", proof.test)
    if found is None:
        return proof.test or "no test"
    path, name, model = found.groups()
    text = (TESTS / path).read_text("utf-8") if (TESTS / path).is_file() else ""
    if re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE) is None:
        return f"{path}::{name}"
    return "" if model is None or f'"{model}"' in text else model


def of(family: Family) -> set[Proof]:
    return set(family.cells.values())


@pytest.mark.parametrize("name", TABLE)
def test_the_tests_that_it_names_exist(name: str) -> None:
    assert {missing(proof) for proof in of(TABLE[name])} <= {""}
    assert all(proof.test.startswith("integration/") for proof in of(TABLE[name]) if proof.kind == "server")


@pytest.mark.parametrize(
    "test",
    ["", "engine/none.py::test_x", "engine/cache/test_families.py::test_x", "no test",
     "integration/cache/test_same_answer.py::test_hits_of_every_kind_give_the_cold_answer[huge]"],
)  # fmt: skip
def test_a_test_that_does_not_exist_is_seen(test: str) -> None:
    assert missing(Proof("server", test))


def test_a_refused_family_has_its_words_and_its_way_out() -> None:
    for family in TABLE.values():
        assert bool(family.cells) != bool(family.refusal) == bool(family.way_out), family.name
