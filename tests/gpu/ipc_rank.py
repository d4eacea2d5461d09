"""A rank with pools in GPU memory, and as a program the owner of one: it prints its address, and serves until
its standard input ends. On the emulated GPU where that of the program that started it is one.
"""

from __future__ import annotations

import asyncio
import os
import sys

if __name__ == "__main__" and os.environ.get("TRITON_INTERPRET") == "1":
    from tests import fake_gpu

    fake_gpu.install(sglang=False)

import numpy as np
import torch

from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.movers.gpu_memory import GpuMemory
from sglang_ext.geometry import mha_geometry

LAYERS, SLOTS, HEADS, WIDTH, PAGE = 2, 256, 2, 32, 4
PAGES = SLOTS // PAGE


def planes(seed: int | None) -> list[torch.Tensor]:
    """K and V of each layer, of random values; of zeros without a seed."""
    made = [torch.zeros(SLOTS, HEADS, WIDTH, dtype=torch.float32, device="cuda") for _ in range(2 * LAYERS)]
    if seed is not None:
        for plane, values in zip(made, values_of(seed), strict=True):
            plane.copy_(values)
    torch.cuda.synchronize()
    return made


def values_of(seed: int) -> list[torch.Tensor]:
    """The values of the seed's `planes`, in host memory."""
    rng = np.random.default_rng(seed)
    shape = (SLOTS, HEADS, WIDTH)
    return [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for _ in range(2 * LAYERS)]


async def start(name: str, pool: list[torch.Tensor], transport: str) -> Endpoint:
    """Serve a pool, and read into it. Where pinned memory is needed, a request takes several slots of it."""
    addresses = [plane.data_ptr() for plane in pool]
    geometry = mha_geometry(
        k_addresses=tuple(addresses[0::2]),
        v_addresses=tuple(addresses[1::2]),
        slots=SLOTS,
        heads=HEADS,
        head_dim=WIDTH,
        dtype="float32",
        first_layer=0,
        model_layers=LAYERS,
        first_head=0,
        model_heads=HEADS,
        block_tokens=PAGE,
        page_tokens=PAGE,
    )
    memory = [MemoryRange(each.data_ptr(), each.nbytes, MemoryKind.CUDA, keep=each) for each in pool]
    config = EndpointConfig(
        name,
        "a model",
        transports=(TransportName(transport),),
        device=GpuMemory(0),
        staging_bytes=1 << 20,
        dead_after=20.0,
    )
    return await Endpoint.start(config, [PoolSpec.of_geometry("hbm", geometry, memory, PAGES)])


async def main(seed: int, transport: str) -> None:
    pool = planes(seed)
    endpoint = await start("owner", pool, transport)
    for request in range(3):
        endpoint.publish("hbm", f"r{request}", np.arange(PAGES), ttl=600.0)
    sys.stdout.write(endpoint.address + "\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
