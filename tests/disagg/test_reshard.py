"""Resharding plans: every (layer, head, token) must arrive, for TP n to m, PP n to m, any order of dims."""

import itertools
import random

import numpy as np
import pytest

from sglang_ext.disagg.errors import RangeError, RefusedError
from sglang_ext.disagg.reshard import plan
from sglang_ext.disagg.tensors import PoolMeta, TensorMeta, canonical, pool_strided

LAYERS, HEADS, WIDTH, BLOCKS = 4, 4, 3, 5


class RankPool:
    """One rank's pool in numpy: every element encodes its (layer, kind, head, token, position)."""

    def __init__(self, first_layer, layers, first_head, heads, tokens, order, mla=False, base=0x1000) -> None:
        self.tensors: list[TensorMeta] = []
        self.arrays: dict[tuple[int, str], np.ndarray] = {}
        self.memory: list[tuple[int, np.ndarray]] = []
        address = base
        for layer in range(first_layer, first_layer + layers):
            for kind in ("latent",) if mla else ("k", "v"):
                dims = tuple(d for d in order if not (mla and d == "H"))
                size = {"B": BLOCKS, "L": tokens, "H": heads, "D": WIDTH}
                raw = np.full([size[d] for d in dims], -1, np.float32)
                self.tensors.append(
                    TensorMeta(
                        layer,
                        kind,
                        address,
                        dims,
                        raw.shape,
                        tuple(s // 4 for s in raw.strides),
                        "float32",
                    )
                )
                self.memory.append((address, raw.reshape(-1).view(np.uint8)))
                axes = [dims.index(d) for d in "BLHD" if d in dims]
                view = raw.transpose(axes)
                self.arrays[layer, kind] = view if not mla else view[:, :, None, :]
                address += raw.nbytes + 4096
        shard = (first_layer, layers, first_head, heads, LAYERS, HEADS)
        self.meta = PoolMeta("hbm", BLOCKS, tokens, tuple(self.tensors), shard, 64)
        self.first_head = first_head

    def locate(self, address: int, span: int) -> tuple[int, int]:
        for i, (start, data) in enumerate(self.memory):
            if start <= address and address + span <= start + data.size:
                return i, address - start
        raise RangeError("outside")

    def fill(self) -> None:
        for (layer, kind), a in self.arrays.items():
            b, t, h, d = np.indices(a.shape)
            a[:] = self.value(
                layer, kind, h + (0 if kind == "latent" else self.first_head), b * a.shape[1] + t, d
            )

    @staticmethod
    def value(layer, kind, head, token, d):  # type: ignore[no-untyped-def]
        return (((layer * 3 + "kvl".index(kind[0])) * HEADS + head) * 512 + token) * 4 + d


def ranks(tp: int, pp: int, tokens: int, order: str, *, mla: bool = False) -> list[RankPool]:
    """All ranks of an instance, PP-major; KV heads are replicated when tp > HEADS."""
    result = []
    for stage, rank in itertools.product(range(pp), range(tp)):
        layers = LAYERS // pp
        heads = max(1, HEADS // tp)
        first = 0 if mla else rank * HEADS // tp
        result.append(
            RankPool(stage * layers, layers, first, HEADS if mla else heads, tokens, order, mla=mla)
        )
    return result


def move(remotes: list[RankPool], local: RankPool, plans, remote_ids, local_ids, layers=None) -> int:
    """Carry out the plan byte by byte; returns the bytes moved."""
    moved = 0
    for p in plans.ranks:
        for rr, ro, lr, lo, n in p.runs(np.array(remote_ids), np.array(local_ids), layers).tolist():
            source = remotes[p.rank].memory[rr][1]
            assert ro + n <= source.size
            local.memory[lr][1][lo : lo + n] = source[ro : ro + n]
            moved += n
    return moved


CASES = [
    (a, b, c, d, mla)
    for a, b, c, d in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4))
    for mla in (False, True)
]


def check_case(
    case: tuple[int, int, int, int, bool], orders: tuple[str, str], tokens: tuple[int, int]
) -> None:
    tp, pp, my_tp, my_pp, mla = case
    remotes = ranks(tp, pp, tokens[0], orders[0], mla=mla)
    for r in remotes:
        r.fill()
    for index, local in enumerate(ranks(my_tp, my_pp, tokens[1], orders[1], mla=mla)):
        plans = plan(
            local.meta,
            local.locate,
            [r.meta for r in remotes],
            [r.locate for r in remotes],
            replica=index,
        )
        if tokens[0] == tokens[1]:
            there, here = [4, 0, 2], [1, 2, 0]
        elif tokens[0] > tokens[1]:
            there, here = [3], [1, 4]
        else:
            there, here = [3, 1], [4]
        moved = move(remotes, local, plans, there, here)
        want = [b * tokens[0] + t for b in there for t in range(tokens[0])]
        got = [b * tokens[1] + t for b in here for t in range(tokens[1])]
        wanted_bytes = 0
        for (layer, kind), a in local.arrays.items():
            flat = (
                a.reshape(BLOCKS * tokens[1], a.shape[2], WIDTH)
                if a.flags.c_contiguous
                else np.stack([a[i // tokens[1], i % tokens[1]] for i in range(BLOCKS * tokens[1])])
            )
            for source, target in zip(want, got, strict=True):
                for h in range(a.shape[2]):
                    head = h + (0 if kind == "latent" else local.first_head)
                    expected = RankPool.value(layer, kind, head, source, np.arange(WIDTH))
                    assert flat[target, h].tolist() == expected.tolist()
                    wanted_bytes += WIDTH * 4
            untouched = sorted(set(range(BLOCKS * tokens[1])) - set(got))
            assert (flat[untouched] == -1).all()
        assert moved == wanted_bytes  # nothing was read twice


@pytest.mark.parametrize("seed", range(3))
def test_any_parallelism_to_any_other(seed: int) -> None:
    choose = random.Random(seed)
    for case in choose.sample(CASES, 12):
        orders = ("".join(choose.sample("BLHD", 4)), "".join(choose.sample("BLHD", 4)))
        check_case(case, orders, choose.choice([(2, 2), (4, 2), (2, 4)]))


@pytest.mark.long
def test_every_parallelism_with_every_order_of_dims() -> None:
    choose = random.Random(99)
    for case in CASES:
        for tokens in ((2, 2), (4, 2), (2, 4)):
            for _ in range(3):
                check_case(
                    case, ("".join(choose.sample("BLHD", 4)), "".join(choose.sample("BLHD", 4))), tokens
                )


def test_equal_ranks_move_whole_blocks_and_replicas_share_the_load() -> None:
    remotes = ranks(8, 1, 2, "BLHD")
    local = ranks(8, 1, 2, "BLHD")
    used = []
    for i, me in enumerate(local[:2]):  # both hold head 0
        p = plan(me.meta, me.locate, [r.meta for r in remotes], [r.locate for r in remotes], replica=i)
        used.append([x.rank for x in p.ranks])
        assert p.ranks[0].template.shape[0] == 2 * LAYERS  # one row per plane: a block is one run in each
    assert used == [[0], [1]]


def test_layers_select_a_part() -> None:
    remotes, local = ranks(1, 2, 2, "BLHD"), ranks(1, 1, 2, "BLHD")[0]
    for r in remotes:
        r.fill()
    p = plan(local.meta, local.locate, [r.meta for r in remotes], [r.locate for r in remotes])
    assert [x.layers for x in p.ranks] == [(0, 1), (2, 3)]
    moved = move(remotes, local, p, [1], [2], layers=[3])
    assert moved == 2 * 2 * HEADS * WIDTH * 4
    assert (local.arrays[0, "k"] == -1).all()
    assert (local.arrays[3, "v"][2] != -1).all()


def test_what_cannot_be_exchanged_is_refused_by_name() -> None:
    a, b = ranks(1, 1, 2, "BLHD")[0], ranks(2, 1, 2, "BLHD")
    with pytest.raises(RefusedError, match="no connected peer rank holds layer 0 k head 2"):
        plan(a.meta, a.locate, [b[0].meta, None], [b[0].locate, b[1].locate])
    other = ranks(1, 1, 3, "BLHD")[0]
    with pytest.raises(RefusedError, match="block sizes"):
        plan(a.meta, a.locate, [other.meta], [other.locate])
    half = [TensorMeta(t.layer, t.kind, t.address, t.dims, t.shape, t.stride, "int8") for t in a.meta.tensors]
    meta = PoolMeta("hbm", BLOCKS, 2, tuple(half), a.meta.shard, 64)
    with pytest.raises(RefusedError, match="dtype: KV here is float32, the peer's is int8"):
        plan(a.meta, a.locate, [meta], [a.locate])
    p = plan(a.meta, a.locate, [a.meta], [a.locate]).ranks[0]
    for there, here in (([0], [0, 1]), ([BLOCKS], [0]), ([0], [-1])):
        with pytest.raises(RangeError):
            p.runs(np.array(there), np.array(here))


def test_the_papers_figure_5() -> None:
    """cache[B][KV][L][H][D] with K and V 10 blocks apart: block 8 is two runs of 8192 bytes."""
    meta = TensorMeta(
        0,
        "kv",
        0,
        ("B", "KV", "L", "H", "D"),
        (10, 2, 16, 2, 128),
        (4096, 40960, 256, 128, 1),
        "bfloat16",
    )
    k, v = canonical(meta, 16)
    assert (k.kind, k.block_address(8)) == ("k", 65536)
    assert (v.kind, v.block_address(8)) == ("v", 65536 + 40960 * 2)
    pool = PoolMeta("hbm", 10, 16, (meta,), (0, 1, 0, 2, 1, 2), 0)
    p = plan(pool, lambda a, n: (0, a), [pool], [lambda a, n: (0, a)]).ranks[0]
    assert p.runs(np.array([8]), np.array([8]))[:, 4].tolist() == [8192, 8192]
    assert p.runs(np.array([0, 1]), np.array([0, 1]))[:, 4].tolist() == [16384, 16384]  # coalesced


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dims": ("B", "L", "H")}, "different lengths"),
        ({"dims": ("B", "L", "H", "H")}, "repeated"),
        ({"dims": ("B", "L", "H", "X")}, "unknown"),
        ({"shape": (5, 2, 0, 3)}, "out of range"),
        ({"stride": (24, 12, -3, 1)}, "out of range"),
        ({"stride": (2**60, 12, 3, 1)}, "spans more"),
        ({"address": 2**63}, "out of range"),
        ({"dtype": "complex64"}, "not known"),
        ({"shape": (5, 4, 4, 3)}, "tokens a block"),
        ({"kind": "kv"}, "go together"),
        ({"kind": "q"}, "is not one of kv"),
        ({"shape": (4, 2, 4, 3)}, "has 4 blocks"),
        ({"shape": (5, 2, 3, 3)}, "has 3 heads, which the shard does not share as its 4"),
        ({"layer": 9}, "cover the layers"),
    ],
)
def test_a_peers_metadata_are_not_trusted(change: dict, text: str) -> None:
    good = {
        "layer": 0, "kind": "latent", "address": 4096, "dims": ("B", "L", "H", "D"), "shape": (5, 2, 4, 3),
        "stride": (24, 12, 3, 1), "dtype": "float32",
    }  # fmt: skip
    if "heads" in text:
        good["kind"] = "k"
    with pytest.raises(ValueError, match=text):
        pool_strided(PoolMeta("hbm", 5, 2, (TensorMeta(**{**good, **change}),), (0, 1, 2, 4, 1, 8), 64))
