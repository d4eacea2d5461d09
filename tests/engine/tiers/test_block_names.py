"""Names of blocks: the same after a restart, and never another's."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from sglang_ext.engine.model_identity import (
    config_digest,
    element_sums,
    kv_dtype,
    model_digest,
    weights_digest,
)
from sglang_ext.engine.tiers.block_names import BlockNames, pack_names, unpack_names
from sglang_ext.engine.weights import Weights
from sglang_ext.keys import Namespace, block_keys, encode_tokens
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier

IDENTITY = Namespace("model", "weights", "float32", "layout", "tp0of1")
DISK = Holder.of("names", 1, Tier.DISK)
DRAM = Holder.of("names", 1, Tier.DRAM)
PLAIN = (0, None, None)


def names(identity: Namespace = IDENTITY, fresh: str = "a") -> BlockNames:
    return BlockNames(identity, 4, DISK, fresh)


def test_a_tenant_a_model_or_a_shard_has_names_of_its_own() -> None:
    tenants = [
        PLAIN,
        (0, "a", None),
        (0, None, "a"),
        (0, "a", "a"),
        (0, '["a", null]', None),
        (0, "None", ""),
    ]
    digests = [names().digest(tenant) for tenant in tenants]
    for field in ("model", "weights_version", "dtype", "geometry", "shard"):
        digests.append(names(dataclasses.replace(IDENTITY, **{field: "another"})).digest(PLAIN))
    assert len(set(digests)) == len(digests)


def test_a_restart_finds_its_names_unless_the_weights_were_updated_in_place() -> None:
    before, after = names(fresh="first start"), names(fresh="second start")
    assert before.digest(PLAIN) == after.digest(PLAIN)
    assert before.digest((1, None, None)) != after.digest((1, None, None))
    assert before.digest((1, None, None)) != before.digest((2, None, None)) != before.digest(PLAIN)


def test_weights_that_were_updated_have_the_names_of_a_process_that_started_with_them() -> None:
    now = iter(["weights", "others"])
    weights = Weights("others", lambda: next(now))
    updated = BlockNames(
        dataclasses.replace(IDENTITY, weights_version="others"), 4, DISK, "a", weights=weights
    )
    others = BlockNames(dataclasses.replace(IDENTITY, weights_version="others"), 4, DISK, "b")
    for _ in range(2):
        weights.begin()
        weights.settle()
    assert updated.digest((2, None, None)) == names(fresh="b").digest(PLAIN)
    assert updated.digest((4, None, None)) == updated.digest(PLAIN) == others.digest(PLAIN)
    assert updated.digest((1, None, None)) not in (updated.digest(PLAIN), names().digest(PLAIN))


def test_kv_of_an_adapter_is_not_found_by_a_later_process() -> None:
    """SGLang's ID of an adapter is made from its name and path; the files there may have changed."""
    starts = [BlockNames(IDENTITY, 4, DISK, start, adapters=True) for start in ("first", "second")]
    adapter = (0, "adapter id", None)
    assert starts[0].digest(adapter) != starts[1].digest(adapter)
    assert starts[0].digest(PLAIN) == starts[1].digest(PLAIN)


def test_names_of_a_path_are_the_chained_keys_however_it_is_split_and_known() -> None:
    key = encode_tokens(list(range(40)))
    expected = block_keys(names().digest(PLAIN), key, 4)
    for first, second in itertools.product((1, 3, 5), (6, 8, 9)):
        tree = RadixTree(4)
        node = tree.insert(PLAIN, key, DRAM, np.arange(10)).node
        upper = tree.split(node, first)
        middle = tree.split(node, second - first)
        tree.place(upper, DISK, pack_names(expected[:first]))
        if second % 2:
            tree.place(middle, DISK, pack_names(expected[first:second]))
        for blocks in (1, 10 - second, 10 - first, 10):
            assert names().of_path(node, blocks) == expected[10 - blocks :]
        assert names().last(upper) == expected[first - 1]
    assert names().last(tree.root) == b""


def test_packed_names_keep_zero_bytes() -> None:
    given = [b"\0" * 16, b"a" * 15 + b"\0", b"\0" * 15 + b"b"]
    assert unpack_names(pack_names(given)) == given
    assert unpack_names(pack_names(given)[1:2]) == given[1:2]


class TestModelIdentity:
    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(33, 17, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        return torch.nn.Sequential(*layers, torch.nn.Embedding(5, 3))

    def test_equal_weights_have_equal_digests(self) -> None:
        assert weights_digest(self.model()) == weights_digest(self.model())

    @pytest.mark.parametrize("parameter", range(5))
    def test_any_changed_value_counts(self, parameter: int) -> None:
        model = self.model()
        before = weights_digest(model)
        values = list(model.parameters())[parameter].data.view(-1)
        for place in {0, len(values) // 2, len(values) - 1}:
            kept = values[place].clone()
            values[place] = kept * 1.01 + 0.01
            assert weights_digest(model) != before
            values[place] = kept
        assert weights_digest(model) == before

    def test_exchanged_rows_count(self) -> None:
        model = self.model()
        before = weights_digest(model)
        weight = model[0].weight.data
        weight[[3, 4]] = weight[[4, 3]]
        assert weights_digest(model) != before

    def test_exchanged_chunks_count(self) -> None:
        a = torch.nn.ParameterList([torch.arange(2 << 20, dtype=torch.int64).float()])
        b = torch.nn.ParameterList([torch.roll(a[0].detach(), 1 << 20)])
        assert weights_digest(a) != weights_digest(b)
        assert len({weights_digest(a), weights_digest(a, a), weights_digest(a, b)}) == 3

    def test_the_configuration_counts_where_the_weights_cannot_tell(self) -> None:
        plain, scaled = LlamaConfig(rms_norm_eps=1e-6), LlamaConfig(rms_norm_eps=1e-5)
        assert config_digest(plain) == config_digest(LlamaConfig(rms_norm_eps=1e-6))
        assert config_digest(plain) != config_digest(scaled)
        assert len({config_digest(plain), config_digest(plain, plain), config_digest(plain, scaled)}) == 3
        named = LlamaConfig(rms_norm_eps=1e-6, name_or_path="/somewhere/else")
        assert config_digest(plain) == config_digest(named)


class Attention(torch.nn.Module):
    """Stands where SGLang's ``RadixAttention`` stands: the scales of its KV are attributes."""

    def __init__(self, k_scale: object = None, v_scale: object = None) -> None:
        super().__init__()
        self.k_scale, self.v_scale, self.scaling = k_scale, v_scale, 0.125


class TestScalesAndQuantisation:
    def test_scales_of_the_kv_cache_count_though_they_are_attributes(self) -> None:
        """As ``--quantization-param-path`` sets them."""
        kinds = [
            Attention(),
            Attention(1.0, 1.0),
            Attention(1.0, 0.5),
            Attention(0.5, 1.0),
            Attention(torch.tensor(0.5), torch.tensor(1.0)),
        ]
        digests = {weights_digest(torch.nn.Sequential(kind)) for kind in kinds}
        assert len(digests) == len(kinds)
        whole = {model_digest([element_sums(torch.nn.Sequential(kind))]) for kind in kinds}
        assert len(whole) == len(kinds)

    def test_a_file_of_scales_gives_blocks_other_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SGLang reads ``--quantization-param-path`` into its own attention layers. No server here can run
        with it: SGLang does so for an FP8 cache only, and that wants Intel AMX on a CPU."""
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.models import llama

        monkeypatch.setattr(llama, "get_parallel", lambda: SimpleNamespace(tp_size=1, tp_rank=0))

        def named(scales: list[float] | None) -> tuple[bytes, str]:
            """The name of a prompt's only block, and the digest that prefill and decode compare."""
            layers = [RadixAttention(2, 4, 1.0, 2, layer_id=layer) for layer in range(2)]
            if scales:
                kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {0: dict(enumerate(scales))}}
                file = tmp_path / "scales.json"
                file.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
                model = SimpleNamespace(
                    layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=layer)) for layer in layers],
                    config=LlamaConfig(num_hidden_layers=2),
                    _kv_cache_parallel_layout=(0, 1),  # rank and size, from SGLang 0.5.22 on
                )
                llama.LlamaModel.load_kv_cache_scales(model, str(file))
            whole = torch.nn.Sequential(*layers)
            identity = dataclasses.replace(IDENTITY, weights_version=weights_digest(whole))
            (name,) = block_keys(names(identity).digest(PLAIN), encode_tokens([1, 2, 3, 4]), 4)
            return name, model_digest([element_sums(whole)])

        found = [named(scales) for scales in (None, [2.0, 2.0], [2.0, 2.5], [2.5, 2.0])]
        assert len({name for name, _ in found}) == len({digest for _, digest in found}) == len(found)
        # The twin: the same scales give the same names.
        assert named([2.0, 2.5]) == found[2]

    def test_a_buffer_that_follows_from_the_configuration_does_not_count(self) -> None:
        """Tables of rotary embeddings grow while a server runs."""
        models = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
        for model, rows in zip(models, (2, 4, 4), strict=True):
            model.weight.data.fill_(1.5)
            model.register_buffer("cos_sin_cache", torch.ones(rows), persistent=False)
        models[2].register_buffer("kept", torch.ones(2))
        digests = [weights_digest(model) for model in models]
        assert digests[0] == digests[1] != digests[2]

    def test_the_method_of_quantisation_and_the_dtype_of_the_cache_count(self) -> None:
        plain = SimpleNamespace(dtype=torch.bfloat16, quantization=None)
        quantised = SimpleNamespace(dtype=torch.bfloat16, quantization="w8a8_int8")
        named = {
            kv_dtype(config, dtype)
            for config in (plain, quantised)
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
        }
        assert len(named) == 6


class Qkv(torch.nn.Module):
    """A rank's part of SGLang's ``QKVParallelLinear``: its own queries, and keys and values that others
    may have too."""

    def __init__(self, weight: torch.Tensor, queries: int, keys: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.q_proj_shard_size, self.kv_proj_shard_size, self.v_proj_shard_size = queries, keys, keys


class Merged(torch.nn.Module):
    """A rank's part of SGLang's ``MergedColumnParallelRepeatedLinear``: its own columns, and those of all."""

    def __init__(self, shared: torch.Tensor, repeated: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.cat([shared, repeated]))
        self.num_column_parallel = 2
        self.output_partition_sizes = [len(shared) // 2, len(shared) // 2, len(repeated)]


HEAD, HEADS, KV_HEADS, WIDTH, VOCABULARY = 4, 8, 2, 12, 50


def shard(
    rank: int, ranks: int, *, tuned: bool = False, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """One rank's part of a small model, cut as SGLang cuts models. tuned: one weight of it is another."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads * HEAD, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, up, embed = torch.randn(WIDTH, HEADS * HEAD), torch.randn(16, WIDTH), torch.randn(VOCABULARY, WIDTH)
    if tuned:
        out[3, 5] *= 1.01
    padded = torch.zeros(64 if ranks < 8 else 128, WIDTH)
    padded[:VOCABULARY] = embed
    kv_rank, kv_ranks = rank * KV_HEADS // max(ranks, KV_HEADS), min(ranks, KV_HEADS)

    def rows(tensor: torch.Tensor, at: int, of: int) -> torch.Tensor:
        return tensor.chunk(of, 0)[at].to(dtype)

    model = torch.nn.Module()
    keys = rows(k, kv_rank, kv_ranks)
    model.qkv = Qkv(
        torch.cat([rows(q, rank, ranks), keys, rows(v, kv_rank, kv_ranks)]), HEADS * HEAD // ranks, len(keys)
    )
    merged = [torch.randn(8, WIDTH) for _ in range(3)]
    model.merged = Merged(torch.cat([rows(each, rank, ranks) for each in merged[:2]]), merged[2].to(dtype))
    model.out = torch.nn.Parameter(out.chunk(ranks, 1)[rank].to(dtype))
    model.up = torch.nn.Parameter(rows(up, rank, ranks))
    model.embed = torch.nn.Parameter(rows(padded, rank, ranks))
    model.norm = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).to(dtype))
    return model


def whole(ranks: int, **how: Any) -> str:
    return model_digest([element_sums(shard(rank, ranks, **how)) for rank in range(ranks)])


class TestModelDigest:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_it_is_the_same_however_many_ranks_share_the_model(self, ranks: int, dtype: torch.dtype) -> None:
        """Cut by rows and columns; keys and values repeated where there are more ranks than heads; norms on
        every rank; the vocabulary padded."""
        assert whole(ranks, dtype=dtype) == whole(1, dtype=dtype)

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_one_changed_value_is_seen_by_another_number_of_ranks(self, ranks: int) -> None:
        assert whole(ranks, tuned=True) != whole(1)
        assert whole(ranks, tuned=True) == whole(1, tuned=True)

    def test_a_rank_twice_or_missing_is_seen(self) -> None:
        parts = [element_sums(shard(rank, 2)) for rank in range(2)]
        assert model_digest([parts[0], parts[0]]) != model_digest(parts)
        assert model_digest(parts[:1]) != model_digest(parts)

    def test_tensors_larger_than_a_chunk_count_to_their_ends(self) -> None:
        model = torch.nn.ParameterList([torch.ones((1 << 22) + 3, dtype=torch.bfloat16)])
        before = model_digest([element_sums(model)])
        model[0].data[-1] = 2.0
        assert model_digest([element_sums(model)]) != before
        ((_, count),) = element_sums(model).values()
        assert count == (1 << 22) + 3
