"""A disk tier of an earlier release is found: the names of a plain model's blocks and the format stay.

``older_store.tar.xz`` is the directory of one rank, written at 3b71a3f: four blocks of a prompt, under the
names that a server with this configuration, these weights and this tenant had then.
"""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.engine.model_identity import config_digest, weights_digest
from sglang_ext.geometry import mha_geometry
from sglang_ext.keys import Namespace, block_keys, encode_tokens, tenant_salt
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.tier import BlockMemory, Outcome

LAYOUT = mha_geometry(
    k_addresses=(0, 0), v_addresses=(0, 0), slots=64, heads=2, head_dim=8, dtype="float32"
).layout
BLOCKS = np.arange(4 * LAYOUT.block_bytes, dtype=np.uint64).astype(np.uint8).reshape(4, -1) * 7 + 3
CONFIG = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "_name_or_path": "/elsewhere"}


def model() -> torch.nn.Module:
    made = torch.nn.Linear(4, 3)
    with torch.no_grad():
        made.weight.copy_(torch.arange(12.0).reshape(3, 4))
        made.bias.copy_(torch.arange(3.0))
    return made


def namespace() -> Namespace:
    """That of today's server, named as `patches/adapter/build_disk.py` names it."""
    return Namespace(
        model=config_digest(SimpleNamespace(to_dict=lambda: CONFIG)),
        weights_version=weights_digest(model()),
        dtype="float32/auto",
        geometry=LAYOUT.facts(),
        shard="tp0of1",
        salt=tenant_salt(None, "tenant"),
    )


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    with tarfile.open(Path(__file__).with_name("older_store.tar.xz")) as packed:
        packed.extractall(tmp_path, filter="data")
    return DiskTier(DiskConfig(tmp_path / "store", 1 << 20, segment_bytes=1 << 16), LAYOUT)


def read(
    tier: DiskTier, names: list[bytes], space: Namespace
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    found = np.zeros_like(BLOCKS)
    memory = BlockMemory.of_blocks(LAYOUT, found)
    get = tier.prepare_get(space.digest(), names)
    for layer in range(LAYOUT.n_layers):
        result = tier.get_layer(get, layer, memory, np.arange(get.blocks))
        assert result.outcome is Outcome.DONE
    tier.complete_get(get)
    return found[: get.blocks]


def test_the_blocks_of_an_earlier_release_are_found(tier: DiskTier) -> None:
    space = namespace()
    names = block_keys(space.digest(), encode_tokens(range(100, 164)), LAYOUT.block_tokens)
    assert np.array_equal(read(tier, names, space), BLOCKS)
    tier.check()
    tier.close()


@pytest.mark.parametrize("field", ["model", "weights_version", "dtype", "geometry", "shard", "salt"])
def test_another_namespace_finds_nothing(tier: DiskTier, field: str) -> None:
    """The twin: each part of the name counts."""
    space = replace(namespace(), **{field: "other"})
    names = block_keys(space.digest(), encode_tokens(range(100, 164)), LAYOUT.block_tokens)
    assert tier.match(space.digest(), names) == 0
    tier.close()
