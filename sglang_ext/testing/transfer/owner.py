"""One endpoint in a process of its own, for tests that kill it and benchmarks that measure against it.

    python -m sglang_ext.testing.transfer.owner '{"transports": ["tcp"], "blocks": 64, ...}'

Prints one line of JSON when it serves: {"address": ..., "pid": ...}. Publishes request `r<i>` for i in
range(requests), all blocks each. With `connect` it connects there, takes the lease of `r0`, and prints it and
the transport. With `reserve` it has these blocks there granted, which that one has `aside`; with `write`, it
writes to the first region there without end, and prints what ends that. Ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

from sglang_ext.cluster_key import read_cluster_key
from sglang_ext.disagg.errors import TransferError
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.messages import Reserve, Reserved
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports import CancelToken, Channel, TransportName
from sglang_ext.disagg.transports.cuda_ipc import DeviceMemory
from sglang_ext.testing.transfer.rig import NAMESPACE, Shape, start_instance
from sglang_ext.wire import pack_ids


def say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def write_on(channel: Channel, size: int, grant: tuple[int, int]) -> None:
    """Write the first `size` bytes of the first pool there, whatever else goes on, until that fails."""
    token = CancelToken()
    runs = np.array([(1, 0, 1, 0, size)], np.int64)
    try:
        while True:
            channel.write(0, runs, token, grant)
    except TransferError as error:
        say({"ended": str(error)})


async def main(options: dict[str, Any], device: DeviceMemory | None = None) -> None:
    """Serve until standard input ends. device: the GPU in whose memory the pool is said to be."""
    shape = Shape(**options.get("shape", {}))
    config = EndpointConfig(
        options.get("name", "owner"),
        options.get("namespace", NAMESPACE),
        bind=options.get("bind", "127.0.0.1"),
        announce=options.get("announce", ""),
        ports=tuple(options.get("ports", (0,))),
        keys=read_cluster_key(options["key_file"]) if "key_file" in options else None,
        transports=tuple(TransportName(t) for t in options.get("transports", ())),
        lanes=options.get("lanes", 1),
        heartbeat=options.get("heartbeat", 0.1),
        dead_after=options.get("dead_after", 1.0),
        far_after=options.get("far_after", 0.0),
        device=device,
    )
    ranks = await start_instance(
        config,
        shape,
        shared=options.get("shared", True),
        arena=options.get("arena", False),
        kind=MemoryKind.HOST if device is None else MemoryKind.CUDA,
    )
    rank = ranks[0]
    rank.pool.fill(options.get("seed", 1))
    every = np.setdiff1d(np.arange(shape.blocks), options.get("aside", ()))
    rank.owned.seal(every)
    rank.receiver.aside = set(options.get("aside", ()))
    for i in range(options.get("requests", 1)):
        rank.endpoint.publish("hbm", f"r{i}", every, ttl=600.0)
    found: dict[str, Any] = {"address": rank.endpoint.address}
    if "connect" in options:
        instance = await rank.endpoint.connect([options["connect"]])
        found["transport"] = str(instance.links[0].peer.channel.name)
        found["lease"] = (await instance.offer(0, "r0", "hbm")).lease
        if "reserve" in options:
            link = instance.links[0]
            held = await link.ask(
                Reserve(link.session, "push", "hbm", pack_ids(np.array(options["reserve"]))), 5.0
            )
            assert isinstance(held, Reserved)
            grant = held.slot, held.grant
    say(found)
    loop = asyncio.get_running_loop()
    if "write" in options:
        channel = instance.links[0].peer.channel
        loop.run_in_executor(None, write_on, channel, options["write"], grant)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    for rank in ranks:
        await rank.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))
