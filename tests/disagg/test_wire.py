"""Whatever comes in is a message or the peer's protocol error; nothing else."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.disagg.memory import MemoryKind, RegionMeta
from sglang_ext.disagg.messages import REPLIES, REQUESTS, Complete, Connect, Identity, Ping, Reserve
from sglang_ext.disagg.tensors import PoolMeta, TensorMeta
from sglang_ext.errors import InternalError
from sglang_ext.wire import Codec, Message, WireError, pack_ids, unpack_ids

TENSOR = TensorMeta(0, "k", 4096, ("B", "L", "H", "D"), (4, 16, 2, 8), (256, 16, 8, 1), "float16")
WHO = Identity(
    1, "i", 0, b"e" * 16, "ns", "host", 7, "127.0.0.1:1",
    (RegionMeta(4096, 1 << 20, MemoryKind.HOST, 3, 0, 1, 2),),
    (PoolMeta("hbm", 4, 16, (TENSOR,), (0, 1, 0, 2, 1, 2), 64),),
)  # fmt: skip
VALID = [
    Connect(WHO, {"tcp": b"x"}),
    Ping(b"s" * 16, "shm"),
    Complete(b"s" * 16, "r", 3),
    Reserve(b"s" * 16, "r", "hbm", pack_ids([3, 1])),
]


def decodes(codec: Codec, data: bytes) -> object | None:
    """The message, or None for a protocol error; anything else escapes and fails the test."""
    try:
        return codec.decode(data)
    except WireError:
        return None


@pytest.mark.parametrize("message", VALID, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert REQUESTS.decode(REQUESTS.encode(message)) == message


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_refused_or_a_message(data: bytes) -> None:
    for codec in (REQUESTS, REPLIES):
        found = decodes(codec, data)
        assert found is None or isinstance(found, Message)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_damaged_messages_are_refused_or_a_message(
    message: Message, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(REQUESTS.encode(message))
    for at, value in changes:
        data[at % len(data)] = value
    found = decodes(REQUESTS, bytes(data[: len(data) - cut]))
    assert found is None or REQUESTS.decode(REQUESTS.encode(found)) == found


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers(-9, 1 << 63) | st.binary(max_size=20) | st.text(max_size=9),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=9), x),
        max_leaves=20,
    )
)
def test_other_msgpack_is_refused(value: object) -> None:
    found = decodes(REQUESTS, msgspec.msgpack.encode({"t": "connect", "who": value, "transports": value}))
    assert found is None


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 200000]
)
def test_announced_sizes_allocate_nothing(head: bytes) -> None:
    with pytest.raises(WireError, match="not a message"):
        REQUESTS.decode(b"\x82\xa1t\xa4ping\xa7session" + head)


def test_too_large_is_refused_on_both_sides() -> None:
    small: Codec = Codec(Ping, 40)
    with pytest.raises(WireError, match="exceeds the limit of 40"):
        small.decode(b"x" * 41)
    with pytest.raises(InternalError, match="the limit is 40"):
        small.encode(Ping(b"s" * 16, "x" * 100))


def test_id_lists_are_checked() -> None:
    assert unpack_ids(pack_ids([3, 0]), 4).tolist() == [3, 0]
    for bad in (b"1234567", pack_ids([4]), pack_ids([-1])):
        with pytest.raises(WireError):
            unpack_ids(bad, 4)
    assert pack_ids(np.array([1], np.int32)) == b"\x01" + b"\0" * 7
