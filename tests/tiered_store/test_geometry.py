"""Planes, geometry and block layout."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import msgspec
import pytest

from sglang_ext.geometry import (
    BlockLayout,
    Geometry,
    Plane,
    PlaneKind,
    Shard,
    mha_geometry,
    mla_geometry,
)


def kvdirect_plane(**changes: object) -> Plane:
    plane = Plane(3, PlaneKind.K, 0x7F06F40000, ("T", "H", "D"), (160, 2, 128), (256, 128, 1), "float16")
    return dataclasses.replace(plane, **changes)  # type: ignore[arg-type]


def test_plane_sizes_follow_shape_and_dtype() -> None:
    plane = kvdirect_plane()
    assert (plane.row_bytes, plane.slot_stride, plane.slots) == (512, 512, 160)
    assert plane.nbytes == 160 * 512
    assert plane.dim("H") == 2
    padded = kvdirect_plane(stride=(300, 128, 1))
    assert (padded.row_bytes, padded.slot_stride) == (512, 600)
    assert padded.nbytes == 159 * 600 + 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": ("H", "T", "D")}, "start with 'H'"),
        ({"dims": ("T", "D", "D")}, "twice"),
        ({"shape": (160, 2)}, "same length"),
        ({"stride": (256, 1, 2)}, "not contiguous"),
        ({"stride": (255, 128, 1)}, "overlap"),
        ({"dtype": "float5"}, "float5"),
        ({"shape": (0, 2, 128)}, "out of range"),
    ],
)
def test_impossible_planes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvdirect_plane(**changes)


def test_mha_geometry_orders_planes_by_layer() -> None:
    geometry = mha_geometry(
        k_addresses=(0x1000, 0x2000),
        v_addresses=(0x3000, 0x4000),
        slots=64,
        heads=2,
        head_dim=8,
        v_head_dim=4,
        dtype="bfloat16",
        first_layer=2,
        model_layers=6,
        first_head=2,
        model_heads=4,
    )
    assert [(p.layer, p.kind.value) for p in geometry.planes] == [(2, "k"), (2, "v"), (3, "k"), (3, "v")]
    assert geometry.layer_planes(1)[1].address == 0x4000
    assert geometry.layout == BlockLayout(16, ((32, 16), (32, 16)))
    assert not geometry.shard.whole


def test_mla_geometry_has_one_plane_per_layer() -> None:
    geometry = mla_geometry(addresses=(1, 2, 3), slots=32, latent_dim=576, dtype="bfloat16")
    assert geometry.layout.layers == ((1152,),) * 3
    assert geometry.block_bytes == 3 * 16 * 1152
    assert geometry.shard.whole


def test_layout_offsets() -> None:
    layout = BlockLayout(4, ((8, 2), (6,), (8, 2)))
    assert layout.plane_offsets == (0, 32, 40, 64, 96, 104)
    assert layout.layer_offsets == (0, 40, 64, 104)
    assert [layout.layer_bytes(i) for i in range(3)] == [40, 24, 40]
    assert [list(layout.planes_of(i)) for i in range(3)] == [[0, 1], [2], [3, 4]]
    assert (layout.n_planes, layout.token_bytes, layout.block_bytes) == (5, 26, 104)
    assert layout.facts() == "block_tokens=4;layers=1x(8+2),1x(6),1x(8+2)"


def test_digest_ignores_addresses_and_pool_size_but_nothing_else() -> None:
    def make(**changes: object) -> Geometry:
        facts: dict[str, object] = {
            "k_addresses": (1,),
            "v_addresses": (2,),
            "slots": 64,
            "heads": 2,
            "head_dim": 8,
            "dtype": "bfloat16",
            "model_heads": 4,
        }
        return mha_geometry(**(facts | changes))  # type: ignore[arg-type]

    base = make().digest()
    assert make(k_addresses=(9,), slots=80).digest() == base
    for changes in (
        {"dtype": "float16"},
        {"heads": 1},
        {"head_dim": 16},
        {"first_head": 2},
        {"model_heads": 8},
        {"block_tokens": 32},
        {"model_layers": 2},
    ):
        assert make(**changes).digest() != base, changes


def test_geometry_refuses_what_it_cannot_describe() -> None:
    geometry = mla_geometry(addresses=(1, 2), slots=32, latent_dim=8, dtype="float16")
    first, second = geometry.planes
    with pytest.raises(ValueError, match="ordered by layer"):
        dataclasses.replace(geometry, planes=(second, first))
    with pytest.raises(ValueError, match="cover layers"):
        dataclasses.replace(geometry, planes=(first,))
    with pytest.raises(ValueError, match="--kv-block-size"):
        dataclasses.replace(geometry, block_tokens=16, page_tokens=32)
    with pytest.raises(ValueError, match="same number of token slots"):
        dataclasses.replace(geometry, planes=(first, dataclasses.replace(second, shape=(16, 8))))
    with pytest.raises(ValueError, match="expected K and V"):
        dataclasses.replace(geometry, planes=(first, dataclasses.replace(second, kind=PlaneKind.V)))
    with pytest.raises(ValueError, match="outside of the model"):
        Shard(0, 3, 0, 1, model_layers=2, model_heads=1)


def test_geometry_travels_as_plain_data() -> None:
    geometry = mla_geometry(addresses=(1, 2), slots=32, latent_dim=8, dtype="float16")
    wire = msgspec.msgpack.encode(geometry)
    assert msgspec.msgpack.decode(wire, type=Geometry) == geometry


def test_importing_geometry_loads_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_ext.geometry; print(sorted({'torch', 'sglang', 'numba'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
