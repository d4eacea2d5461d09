"""Families of models by what SGLang keeps for a token, and how each feature was proven for each.

``TABLE`` is the one place: docs/models.md is printed from it, ``sglang-ext doctor --model-path`` reads it,
and ``tests/engine/cache/test_families.py`` holds ``admission`` to it. A cell that is absent is refused at
start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sglang_ext.patches.adapter.admission import Facts

Column = Literal[
    "HBM", "DRAM", "disk", "fetch", "PD", "return", "migration", "hints", "speculation", "TP", "DP",
    "DP attention", "CP", "PP", "PP in PD", "DP in PD"
]  # fmt: skip
COLUMNS: tuple[Column, ...] = (
    "HBM", "DRAM", "disk", "fetch", "PD", "return", "migration", "hints", "speculation", "TP", "DP",
    "DP attention", "CP", "PP", "PP in PD", "DP in PD"
)  # fmt: skip
TIERS: tuple[Column, ...] = ("HBM", "DRAM", "disk")

Kind = Literal["server", "oracle", "emulator", "reading"]
PROVEN = frozenset({"server", "oracle", "emulator"})
"""Kinds that count as a proof: a real server's answers compared; SGLang's own pools with a function in place
of the model; CUDA's branches emulated on a CPU. A reading of the source proves nothing yet."""


@dataclass(frozen=True)
class Proof:
    """How a cell was proven; ``test`` is ``FILE::NAME`` below ``tests``, with the model in brackets where the
    test has several, and empty for a reading."""

    kind: Kind
    test: str = ""


@dataclass(frozen=True)
class Family:
    """Models with one kind of KV."""

    name: str
    members: str
    cells: Mapping[Column, Proof] = field(default_factory=dict)
    refusal: str = ""
    """Words of the refusal, where no tier is served."""
    way_out: str = ""

    @property
    def proven(self) -> bool:
        """Whether HBM, DRAM and disk are served and proven."""
        return all(map(self._is_proven, TIERS))

    @property
    def drafts(self) -> bool:
        """Whether speculative decoding is proven."""
        return self._is_proven("speculation")

    def _is_proven(self, column: Column) -> bool:
        return column in self.cells and self.cells[column].kind in PROVEN


_READ = Proof("reading")
# Families of one slot of KV per token share the code of MHA, which moves planes of any shape.
_BY_READING: dict[Column, Proof] = dict.fromkeys(COLUMNS, _READ)


_RANKS = "engine/hybrid/test_oracle_ranks.py::test_ranks_keep_equal_trees_above_unlike_tiers"


def _answers(model: str) -> dict[Column, Proof]:
    """The cells that the comparison of answers proves for a model of the tests."""
    test = f"integration/cache/test_same_answer.py::test_hits_of_every_kind_give_the_cold_answer[{model}]"
    return _BY_READING | dict.fromkeys(TIERS, Proof("server", test))


def _server(test: str) -> Proof:
    return Proof("server", f"integration/{test}")


_BY_FAMILY: Mapping[Column, str] = MappingProxyType(
    {
        "fetch": "cache/test_fetching_by_family.py::test_what_one_has_computed_another_fetches[{}]",
        "PD": "pd/test_pd.py::test_conversations_get_the_answers_of_one_server[{}]",
        "return": "pd/test_pd.py::test_the_next_turn_finds_what_its_design_keeps[{}]",
        "migration": "pd/test_migration.py::test_every_answer_is_the_undisturbed_one[{}]",
        "hints": "router/test_advisory.py::test_no_hint_changes_an_answer[{}]",
        "speculation": "cache/test_drafts.py::test_from_disk_dram_and_hbm_the_draft_guesses_as_well[{}]",
        "TP": "cache/test_same_answer.py::test_hits_of_every_kind_give_the_cold_answer[{}-tp2]",
        "CP": "cache/test_same_answer.py::test_hits_of_every_kind_give_the_cold_answer[{}-cp2]",
        "DP": "cache/test_replicas.py::test_a_conversation_stays_with_the_replica_that_has_its_kv[{}]",
    }
)
"""Tests that have a server of each family."""


def _also(model: str, *columns: Column) -> dict[Column, Proof]:
    """The cells that those tests prove for a model."""
    return {column: _server(_BY_FAMILY[column].format(model)) for column in columns}


def _resumed(model: str) -> dict[Column, Proof]:
    """The cells that later turns of conversations prove for a model of the tests with windows or states."""
    turns = _server(f"cache/test_hybrid_tiers.py::test_a_restart_goes_on_from_disk[{model}]")
    hints = _server(f"router/test_hybrid_cluster.py::test_members_of_a_cluster[{model}]")
    ranks = _server(f"cache/test_hybrid_tiers.py::test_a_restart_goes_on_from_disk[{model}-tp2]")
    return {**dict.fromkeys(TIERS, turns), "hints": hints, "TP": ranks, **_also(model, "fetch")}


def _replicas(kind: str) -> Proof:
    return _server(f"cache/test_replicas.py::test_each_replica_loads_from_its_dram[{kind}]")


def _pairs_of_replicas(kind: str) -> Proof:
    return _server(f"pd/test_pd_replicas.py::test_conversations_get_the_answers_of_one_server[{kind}]")


def _handed_over(kind: str) -> Proof:
    return _server(f"pd/test_pd_hybrids.py::test_conversations_get_the_answers_of_one_server[{kind}]")


def _returned(kind: str) -> Proof:
    return _server(f"pd/test_pd_hybrid_caches.py::test_the_next_turn_finds_what_its_design_keeps[{kind}]")


def _pages(pools: str) -> dict[Column, Proof]:
    """The cells that SGLang's pools with a row for each page prove, with a function in place of the model."""
    test = f"engine/hybrid/test_oracle_pages.py::test_every_row_from_dram_and_disk_is_right[{pools}]"
    draft = f"engine/hybrid/test_oracle_drafts.py::test_every_row_of_a_draft_with_pages_is_right[{pools}]"
    moved = f"engine/pd/test_pd_whole_requests.py::test_all_of_a_request_is_handed_over[{pools}]"
    hint = f"engine/hybrid/test_oracle_hints.py::test_blocks_that_a_hint_brings_are_right[{pools}]"
    fetch = f"engine/hybrid/test_oracle_fetches.py::test_a_prompt_of_another_instance_is_found[{pools}]"
    return dict.fromkeys(TIERS, Proof("oracle", test)) | {
        "hints": Proof("oracle", hint),
        "fetch": Proof("oracle", fetch),
        "TP": Proof("oracle", f"{_RANKS}_of_large_pages"),
        "PD": Proof("oracle", moved),
        "migration": Proof("oracle", f"{_MOVED_BY_NAME}[{pools}]"),
        "speculation": Proof("oracle", draft),
    }


# Below SGLang's own tree, which keeps windows and states in HBM.
_BELOW_STOCK: dict[Column, Proof] = dict.fromkeys(
    (*TIERS, "fetch", "hints", "DP", "DP attention", "DP in PD"), _READ
) | {"TP": Proof("oracle", _RANKS)}
_MOVED = "engine/pd/test_moved_pages.py::test_every_plane_of_a_moved_request_comes"
_MOVED_ROWS = "engine/pd/test_moved_rows.py::test_all_of_a_moved_request_comes"
_CONTEXTS = "engine/cache/test_context_ranks.py::test_every_row_is_right_on_ranks_with_the_same_kv"
_MOVED_BY_NAME = "engine/hybrid/test_oracle_moves.py::test_a_request_goes_on_at_another_scheduler"
_DSA_RETURN = "engine/pd/test_pd_returns.py::test_every_plane_of_a_block_returns"
_STATE_DRAFTS = "engine/hybrid/test_oracle_drafts.py::test_every_row_from_dram_and_disk_is_right"
_FAMILY_DRAFTS = (
    "engine/peers/test_family_drafts.py::test_every_row_of_a_draft_from_hbm_dram_disk_and_a_peer_is_right"
)
_BEFORE_PICTURES = "test_what_comes_before_a_picture_is_matched_fetched_and_prefetched"
_PICTURES = "engine/peers/test_picture_prompts.py"
_PICTURE_BELOW = "test_a_picture_is_found_below_hbm_and_another_is_not"
_DSA_TIERS = "engine/cache/test_simulation.py::test_a_prompt_with_index_keys_is_found"
_DSA_TRAFFIC = "engine/cache/test_simulation.py::test_every_row_is_right_and_every_slot_has_one_owner"
_DSA_HINTS = "engine/prefetch/test_prefetch.py::test_index_keys_of_model_and_draft_are_brought_from_disk"
_DSA_RANKS = "engine/cache/test_ranks_in_step.py::test_ranks_keep_equal_trees"
_DSA_PD = "engine/pd/test_pd_pools.py::test_every_plane_of_a_page_is_handed_over"
_DSA_FETCH = "engine/peers/test_peer_kv.py::test_every_plane_of_a_block_comes"
_STOCK = "Start without `--radix-cache-backend global`"

TABLE: Mapping[str, Family] = MappingProxyType(
    {
        "gqa": Family(
            "MHA or GQA, dense",
            "Llama 3, Qwen2.5, Qwen3, Mistral, Ministral, Phi-4-mini",
            _answers("tiny")
            | {
                "fetch": _server("cache/test_fetching.py::test_what_one_has_computed_another_fetches"),
                "PD": _server("pd/test_pd.py::test_conversations_get_the_answers_of_one_server"),
                "return": _server("pd/test_pd.py::test_the_next_turn_finds_what_its_design_keeps"),
                "migration": _server("pd/test_migration.py::test_every_answer_is_the_undisturbed_one"),
                "hints": _server("router/test_advisory.py::test_no_hint_changes_an_answer"),
                "speculation": _server(
                    "cache/test_drafts.py::test_from_disk_dram_and_hbm_the_draft_guesses_as_well"
                ),
                "TP": _server("pd/test_pd_tp.py::test_conversations_get_the_answers_of_one_rank"),
                "DP": _replicas("tiny"),
                "CP": Proof("oracle", f"{_CONTEXTS}[mha]"),
                "PP": _answers("tiny-untied-pp2")["HBM"],
                "DP in PD": _pairs_of_replicas("tiny"),
                "PP in PD": _server(
                    "pd/test_pd_pipeline.py::test_conversations_get_the_answers_of_one_server"
                ),
            },
        ),
        "gqa-moe": Family(
            "MHA or GQA with experts",
            "Qwen3-MoE and Coder, Mixtral, GLM-4.5 to 4.7, MiniMax-M2, ERNIE 4.5, Hy3",
            _answers("tiny-moe")
            | _also("tiny-moe", "CP", "fetch", "PD", "return", "migration", "hints", "TP", "DP")
            | {
                "speculation": Proof("oracle", f"{_FAMILY_DRAFTS}[gqa-moe]"),
                "DP attention": _replicas("tiny-moe-attention"),
                "PP": _answers("tiny-moe-pp2")["HBM"],
                "DP in PD": _pairs_of_replicas("tiny-moe"),
                "PP in PD": _server(
                    "pd/test_pd_pipeline.py::test_conversations_get_the_answers_of_one_server[tiny-moe-2-to-2]"
                ),
            },
        ),
        "mla": Family(
            "MLA, dense",
            "DeepSeek-V2 with dense layers, MiniCPM3",
            _answers("tiny-mla")
            | _also("tiny-mla", "CP", "fetch", "PD", "return", "migration", "hints", "speculation", "TP")
            | {"DP": _replicas("tiny-mla"), "DP in PD": _pairs_of_replicas("tiny-mla")},
        ),
        "mla-moe": Family(
            "MLA with experts",
            "DeepSeek V3, R1, V3.1, Kimi K2 (text), LongCat-Flash, GLM-4.7-Flash",
            _answers("tiny-mla-moe")
            | _also("tiny-mla-moe", "CP", "fetch", "PD", "return", "migration", "hints", "TP")
            | {
                "speculation": Proof("oracle", f"{_FAMILY_DRAFTS}[mla-moe]"),
                "DP": _replicas("tiny-mla-moe"),
                "DP attention": _replicas("tiny-mla-moe-attention"),
                "DP in PD": _pairs_of_replicas("tiny-mla-moe-attention"),
            },
        ),
        "window-kept": Family(
            "Sliding windows of which SGLang keeps all KV",
            "Gemma 2 and 3 (text), Olmo 3, Exaone 4, Cohere 2",
            _answers("tiny-gemma3")
            | _also("tiny-gemma3", "fetch", "PD", "return", "migration", "hints", "speculation", "TP")
            | {"DP": _replicas("tiny-gemma3"), "DP in PD": _pairs_of_replicas("tiny-gemma3")},
        ),
        "window-flag": Family(
            "Sliding windows with `--disable-hybrid-swa-memory`",
            "gpt-oss, Llama 4, others whose layers with windows have the heads of the rest",
            _answers("tiny-spark-whole"),
        ),
        "vision": Family(
            "MHA or GQA with pictures or sounds, experts or not",
            "Qwen2.5-VL, Qwen3-VL, GLM-4.6V, Qwen2-Audio",
            _BY_READING
            | {
                "HBM": _server("cache/test_pictures.py::test_the_same_picture_is_found_in_hbm"),
                "DRAM": _server(
                    "cache/test_pictures.py::test_a_picture_comes_from_dram_and_one_damaged_bit_of_it_is_seen"
                ),
                "disk": _server(
                    "cache/test_pictures.py::test_a_restart_finds_the_picture_on_disk_and_no_other"
                ),
                "PD": _server("cache/test_pictures.py::test_prefill_and_decode_hand_pictures_over"),
                # Of tokens before the first picture: a router does not know the tokens of a picture.
                "fetch": _server(f"router/test_routed_pictures.py::{_BEFORE_PICTURES}"),
                "hints": _server(f"router/test_routed_pictures.py::{_BEFORE_PICTURES}"),
                "speculation": Proof("oracle", f"{_FAMILY_DRAFTS}[vision]"),
            },
        ),
        "vision-mla": Family(
            "MLA with pictures",
            "Kimi K2.5 to K2.7",
            _BY_READING
            | {
                "HBM": Proof(
                    "oracle", f"{_PICTURES}::test_a_picture_is_found_in_hbm_and_another_is_not[mla]"
                ),
                "DRAM": Proof("oracle", f"{_PICTURES}::{_PICTURE_BELOW}[mla]"),
                "disk": Proof("oracle", f"{_PICTURES}::{_PICTURE_BELOW}[mla]"),
                # Of tokens before the first picture, as above.
                "fetch": Proof("oracle", f"{_PICTURES}::test_the_words_before_a_picture_are_fetched[mla]"),
                "hints": Proof("oracle", f"{_PICTURES}::test_a_hint_brings_the_words_before_a_picture[mla]"),
            },
        ),
        "embedding": Family(
            "Embeddings by causal attention (`--is-embedding`)",
            "Qwen3-Embedding, e5-mistral, rerankers made of decoders",
            _BY_READING
            | {
                "DRAM": _server("cache/test_embeddings.py::test_a_prefix_from_dram_gives_the_same_vector"),
            },
        ),
        "encoder": Family(
            "Bidirectional attention",
            "BERT and other encoders",
            refusal="bidirectional attention",
            way_out=f"{_STOCK}, and with `--disable-radix-cache`",
        ),
        "window": Family(
            "Sliding windows in a pool of their own",
            "gpt-oss, Llama 4, Step-3.5, Gemma 4, MiMo-V2, Laguna, Muse Glimmer, Muse Spark",
            _BELOW_STOCK
            | _resumed("tiny-spark")
            | {
                "PD": _handed_over("windows"),
                "return": _returned("windows-3"),
                "migration": _server(
                    "pd/test_hybrid_migration.py::test_every_answer_is_the_undisturbed_one[decode-windows]"
                ),
                "DP": _replicas("tiny-spark"),
                "DP attention": _replicas("tiny-step-attention"),
                "speculation": _server(
                    "cache/test_hybrid_drafts.py::test_from_disk_dram_and_hbm_the_draft_guesses_as_well"
                ),
            },
        ),
        "dsa": Family(
            "Latents and an index (DSA)",
            "DeepSeek V3.2, GLM-5 to 5.3, Hy4",
            _BY_READING
            | dict.fromkeys(TIERS, Proof("oracle", _DSA_TIERS))
            | {
                "fetch": Proof("oracle", _DSA_FETCH),
                "PD": Proof("oracle", _DSA_PD),
                "return": Proof("oracle", _DSA_RETURN),
                "migration": Proof("oracle", f"{_MOVED}[dsa]"),
                "hints": Proof("oracle", _DSA_HINTS),
                "speculation": Proof("oracle", _DSA_TRAFFIC),
                "TP": Proof("oracle", _DSA_RANKS),
                "CP": Proof("oracle", f"{_CONTEXTS}[dsa]"),
            },
        ),
        "dsa-group": Family(
            "Latents and an index with a key for several tokens, with states",
            "GLM-5.3-Flash",
            _BELOW_STOCK | _pages("grouped"),
        ),
        "state": Family(
            "States: GDN, KDA, Mamba2, lightning, short convolution",
            "Qwen3-Next, Qwen3.5 to 3.8, Kimi Linear and K3, Nemotron-H, Falcon-H1, Granite 4, LFM2, Ling, "
            "Inkling",
            _BELOW_STOCK
            | _resumed("tiny-gdn")
            | {
                "PD": _handed_over("states"),
                "return": _returned("states-3"),
                "migration": _server(
                    "pd/test_hybrid_migration.py::test_every_answer_is_the_undisturbed_one[decode-states]"
                ),
                "DP": _replicas("tiny-gdn"),
                "DP attention": _replicas("tiny-gdn-attention"),
                "speculation": Proof("oracle", _STATE_DRAFTS),
            },
        ),
        "dsv4": Family(
            "Compressed latents and windows",
            "DeepSeek V4, V4.1 Flash",
            _BELOW_STOCK | _pages("compressed"),
        ),
        "msa": Family("GQA and an index (MSA)", "MiniMax-M3", refusal="(MSA)", way_out=_STOCK),
        "qsa": Family(
            "States, and GQA with an index with a key for several tokens (QSA)",
            "Qwen3.8-Flash-Next",
            _BELOW_STOCK | _pages("qsa"),
        ),
    }
)


def family_of(
    facts: Facts, *, latent: bool, experts: bool, windows: bool, whole_windows: bool, embeds: bool
) -> Family:
    """The family of a model.

    Args:
        facts: with the model's part filled in.
        latent: whether its attention is MLA.
        experts: whether it has routed experts.
        windows: whether some layers have a sliding window.
        whole_windows: whether the user gave ``--disable-hybrid-swa-memory``.
        embeds: whether it is served for embeddings.
    """
    marks = (
        (facts.is_bidirectional, "encoder"),
        (facts.is_deepseek_v4, "dsv4"),
        (facts.is_minimax_sparse, "msa"),
        (facts.is_qsa, "qsa"),
        (facts.is_dsa and (facts.index_group > 1 or facts.is_hybrid_ssm), "dsa-group"),
        (facts.is_dsa, "dsa"),
        (facts.is_hybrid_ssm, "state"),
        (facts.is_hybrid_swa, "window"),
        (facts.is_multimodal, "vision-mla" if latent else "vision"),
        (embeds, "embedding"),
        (windows and whole_windows, "window-flag"),
        (latent, "mla-moe" if experts else "mla"),
        (windows, "window-kept"),
        (experts, "gqa-moe"),
    )
    return TABLE[next((name for present, name in marks if present), "gqa")]
