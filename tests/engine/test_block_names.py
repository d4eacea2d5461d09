"""Names of blocks: the same after a restart, and never another's."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from sglang_ext.engine.block_names import BlockNames, pack_names, unpack_names
from sglang_ext.engine.model_identity import config_digest, weights_digest
from sglang_ext.engine.weights import Weights
from sglang_ext.keys import Namespace, Tier, block_keys, encode_tokens
from sglang_ext.radix_global import Holder, RadixTree

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
    """SGLang's id of an adapter is made from its name and path; what lies there may have changed."""
    starts = [BlockNames(IDENTITY, 4, DISK, start, adapters=True) for start in ("first", "second")]
    adapter = (0, "adapter id", None)
    assert starts[0].digest(adapter) != starts[1].digest(adapter)
    assert starts[0].digest(PLAIN) == starts[1].digest(PLAIN)


def test_names_of_a_path_are_the_chained_keys_however_it_is_split_and_whoever_knows_them() -> None:
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

    def test_the_configuration_counts_where_the_weights_cannot_tell(self) -> None:
        plain, scaled = LlamaConfig(rms_norm_eps=1e-6), LlamaConfig(rms_norm_eps=1e-5)
        assert config_digest(plain) == config_digest(LlamaConfig(rms_norm_eps=1e-6))
        assert config_digest(plain) != config_digest(scaled)
        named = LlamaConfig(rms_norm_eps=1e-6, name_or_path="/somewhere/else")
        assert config_digest(plain) == config_digest(named)
