"""The other end of `benchmarks.transfer`, and the ways of moving blocks that ours is measured against.

python -m benchmarks.transfer.legs OPTIONS     the owner: a pool, our endpoint, and a server of each peer
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.common import SEED
from sglang_ext.compiled import STREAM_BYTES
from sglang_ext.disagg.memory import SharedMemory
from sglang_ext.disagg.runs import copy_runs
from sglang_ext.disagg.tensors import TensorMeta
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.disagg.transports import _stream
from sglang_ext.geometry import Shard
from sglang_ext.wire import pack_ids, unpack_ids

Ids = npt.NDArray[np.int64]

MESSAGE_BUFFER = 256 << 10
"""Communication buffer of the message-based baseline: bytes that are gathered, sent and scattered at a
time."""


def specs(memory: SharedMemory, sizes: list[int]) -> list[PoolSpec]:
    """One pool per block size over the same memory; block i of size n lies at i * n."""
    shared = (MemoryRange(memory.address, memory.nbytes, fd=memory.fd, keep=memory),)
    return [
        PoolSpec(
            f"b{n}",
            memory.nbytes // n,
            1,
            (TensorMeta(0, "latent", memory.address, ("B", "D"), (memory.nbytes // n, n), (n, 1), "uint8"),),
            Shard(0, 1, 0, 1, 1, 1),
            shared,
            lease_budget=memory.nbytes // n,
        )
        for n in sizes
    ]


def table(there: Ids, here: Ids, size: int) -> npt.NDArray[np.int64]:
    """Runs of blocks, region 0 on both sides."""
    rows = np.zeros((there.size, 5), np.int64)
    rows[:, 1], rows[:, 3], rows[:, 4] = there * size, here * size, size
    return rows


# --- servers, in threads of the owner ---


def serve_raw(memory: SharedMemory, sock: socket.socket) -> None:
    """Raw sockets: receives offsets once, sends the blocks with sendmsg; no protocol beyond that."""
    s = _stream.Scratch()
    flag = np.zeros(1, np.int64)
    while head := _exactly(sock, 16):
        count, size = struct.unpack("<2q", head)
        offsets = unpack_ids(_exactly(sock, count * 8))
        for start in range(0, count, 1024):
            part = offsets[start : start + 1024]
            s.iov[: part.size, 0] = memory.address + part
            s.iov[: part.size, 1] = size
            if _stream._pump(sock.fileno(), s.iov, 0, part.size, s.message, False, flag):
                return


def serve_messages(memory: SharedMemory, sock: socket.socket) -> None:
    """KVDirect's baseline (figures 3 and 7a): receives block ids, gathers the blocks into its buffer and
    sends that; the next round begins when the reader reports that the blocks are in place.
    """
    buffer = np.zeros(MESSAGE_BUFFER + (1 << 20), np.uint8)
    base, own = np.array([memory.address]), np.array([buffer.ctypes.data])
    flag = np.zeros(1, np.int64)
    while head := _exactly(sock, 16):
        count, size = struct.unpack("<2q", head)
        ids = unpack_ids(_exactly(sock, count * 8))
        copy_runs(table(ids, np.arange(count), size), own, 2, base, 0, 0, flag)
        sock.sendall(memoryview(buffer.data)[: count * size])
        if not _exactly(sock, 1):
            return


def _exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            return b""
        data += part
    return data


def listen(memory: SharedMemory, serve: Callable[[SharedMemory, socket.socket], None]) -> int:
    """Serve one connection in a thread; returns the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        sock, _ = server.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve(memory, sock)

    threading.Thread(target=run, daemon=True).start()
    return int(server.getsockname()[1])


# --- clients: each is made once, and called with (remote ids, local ids, block bytes) ---

Leg = Callable[[Ids, Ids, int], None]


def memory_copy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> Leg:
    """The limit: a copy of the same pattern inside one process, with `shm`'s own loop and its streaming
    stores.
    """
    a, b = np.array([source.ctypes.data]), np.array([target.ctypes.data])
    flag = np.zeros(1, np.int64)

    def leg(there: Ids, here: Ids, size: int) -> None:
        copy_runs(table(there, here, size), b, 2, a, 0, STREAM_BYTES, flag)

    return leg


def raw_cma(pid: int, address: int, target: npt.NDArray[np.uint8]) -> Leg:
    """process_vm_readv with 1024 ranges a call, prepared in one go."""
    from sglang_ext.disagg.transports.local import _vector

    remote, local = np.array([address]), np.array([target.ctypes.data])
    iov, flag = np.zeros((2, 1024, 2), np.int64), np.zeros(1, np.int64)

    def leg(there: Ids, here: Ids, size: int) -> None:
        code = _vector(pid, table(there, here, size), remote, local, iov, flag, False)
        if code:
            raise OSError(-code - 1000, os.strerror(-code - 1000))

    return leg


def raw_sockets(port: int, target: npt.NDArray[np.uint8]) -> Leg:
    """One connection, recvmsg straight into place."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s, flag = _stream.Scratch(), np.zeros(1, np.int64)

    def leg(there: Ids, here: Ids, size: int) -> None:
        sock.sendall(struct.pack("<2q", there.size, size) + pack_ids(there * size))
        for start in range(0, here.size, 1024):
            part = here[start : start + 1024]
            s.iov[: part.size, 0] = target.ctypes.data + part * size
            s.iov[: part.size, 1] = size
            if _stream._pump(sock.fileno(), s.iov, 0, part.size, s.message, True, flag):
                raise ConnectionError("the server closed")

    return leg


def message_based(port: int, target: npt.NDArray[np.uint8]) -> Leg:
    """KVDirect's baseline: per buffer, ask for blocks, receive the buffer, scatter it, say so."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = np.zeros(MESSAGE_BUFFER + (1 << 20), np.uint8)
    own, local = np.array([buffer.ctypes.data]), np.array([target.ctypes.data])
    flag = np.zeros(1, np.int64)

    def leg(there: Ids, here: Ids, size: int) -> None:
        step = max(1, MESSAGE_BUFFER // size)
        for start in range(0, there.size, step):
            ids, into = there[start : start + step], here[start : start + step]
            sock.sendall(struct.pack("<2q", ids.size, size) + pack_ids(ids))
            view = memoryview(buffer.data)[: ids.size * size]
            while len(view):
                view = view[sock.recv_into(view) :]
            copy_runs(table(np.arange(ids.size), into, size), local, 2, own, 0, 0, flag)
            sock.sendall(b"\1")

    return leg


def mooncake_engine(memory: Any) -> tuple[Any, int]:
    """Mooncake's transfer engine over TCP, with `memory` registered. It binds every interface."""
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found,import-untyped,unused-ignore]

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise OSError("mooncake does not start")
    if engine.register_memory(*memory) != 0:
        raise OSError("mooncake does not register the pool")
    return engine, int(engine.get_rpc_port())


def mooncake(port: int, address: int, target: npt.NDArray[np.uint8]) -> Leg:
    """Mooncake's batched synchronous read."""
    engine, _ = mooncake_engine((target.ctypes.data, target.nbytes))

    def leg(there: Ids, here: Ids, size: int) -> None:
        code = engine.batch_transfer_sync_read(
            f"127.0.0.1:{port}",
            (target.ctypes.data + here * size).tolist(),
            (address + there * size).tolist(),
            [size] * there.size,
        )
        if code != 0:
            raise OSError(f"mooncake: {code}")

    return leg


def nixl_agent_of(name: str, memory: tuple[int, int]) -> Any:
    """A NIXL agent with the UCX backend and `memory` registered; no progress thread, which would spin."""
    from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found,import-untyped,unused-ignore]

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(*memory, 0, "")], "DRAM")
    return agent


def nixl(metadata: bytes, address: int, target: npt.NDArray[np.uint8]) -> Leg:
    """NIXL's READ (UCX chooses cma on one host); descriptors made per call, as a request's blocks would."""
    agent = nixl_agent_of("reader", (target.ctypes.data, target.nbytes))
    peer = agent.add_remote_agent(metadata)

    def leg(there: Ids, here: Ids, size: int) -> None:
        rows = np.zeros((2, there.size, 3), np.uint64)
        rows[0, :, 0], rows[1, :, 0] = target.ctypes.data + here * size, address + there * size
        rows[:, :, 1] = size
        local = agent.get_xfer_descs(rows[0], "DRAM")
        remote = agent.get_xfer_descs(rows[1], "DRAM")
        handle = agent.initialize_xfer("READ", local, remote, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"nixl: {state}")

    return leg


def in_turn(steps: Sequence[Callable[[], Any]], start: int) -> Callable[[], Any]:
    """One after the other, round and round. Legs that start elsewhere are not at the same blocks together."""
    turns = itertools.cycle(range(len(steps)))
    for _ in range(start % len(steps)):
        next(turns)
    return lambda: steps[next(turns)]()


def one_by_one(steps: Sequence[Callable[[], None]]) -> None:
    """Each after the one before."""
    for step in steps:
        step()


async def owner(options: dict[str, Any]) -> None:
    """Serve everything until standard input ends."""
    memory = SharedMemory(options["bytes"], "bench")
    memory.array[:] = np.random.default_rng(SEED).integers(0, 256, memory.nbytes, dtype=np.uint8)
    config = EndpointConfig("owner", "bench", lanes=options["lanes"], heartbeat=60.0, dead_after=600.0)
    endpoint = await Endpoint.start(config, specs(memory, options["sizes"]))
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "control": endpoint.address,
        "address": memory.address,
        "raw": listen(memory, serve_raw),
        "message": listen(memory, serve_messages),
    }
    stop = threading.Event()
    keep: list[Any] = []
    if options["mooncake"]:
        engine, found["mooncake"] = mooncake_engine((memory.address, memory.nbytes))
        keep.append(engine)
    if options["nixl"]:
        agent = nixl_agent_of("owner", (memory.address, memory.nbytes))
        found["nixl"] = agent.get_agent_metadata().hex()
        keep.append(agent)

        def poke() -> None:
            # Without a progress thread the target has to be asked now and then, or the first transfer hangs.
            while not stop.wait(0.02):
                agent.get_new_notifs()

        threading.Thread(target=poke, daemon=True).start()
    for spec in specs(memory, options["sizes"]):
        endpoint.pools[spec.name].seal(np.arange(spec.blocks))
    sys.stdout.write("READY " + json.dumps(found) + "\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        name, request, blocks = json.loads(line)
        for instance in ("shm", "cma", "tcp"):
            endpoint.publish(name, f"{request}/{instance}", np.array(blocks), 3600.0)
        sys.stdout.write("OK\n")
        sys.stdout.flush()
    stop.set()
    os._exit(0)  # the peers' libraries keep threads that have no end


if __name__ == "__main__":
    asyncio.run(owner(json.loads(sys.argv[1])))
