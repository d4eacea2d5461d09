"""Two processes on one GPU: one reads the other's pool with the kernel of loads, by `cuda_ipc`, or through
pinned memory by `shm` and `tcp`.

`tests/disagg/test_cuda_ipc.py` runs these on the emulated GPU too, with the kernel in Triton's interpreter.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from sglang_ext.disagg.errors import PeerGoneError
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports.pinned import StagedChannel
from sglang_ext.testing.waiting import until
from tests.gpu.ipc_rank import PAGE, PAGES, planes, start, values_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@asynccontextmanager
async def owner(seed: int, transport: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.gpu.ipc_rank", str(seed), transport),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(240):
            line = await child.stdout.readline()
        yield child, line.decode().strip()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def same(pool: list[torch.Tensor], pages: np.ndarray, seed: int) -> bool:
    """Whether each of ``pages`` has the rows of the owner's page of its place, and no other has any."""
    slots = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
    for plane, there in zip(pool, values_of(seed), strict=True):
        expected = torch.zeros_like(there)
        expected[torch.from_numpy(slots)] = there[: len(slots)]
        if not torch.equal(plane.cpu(), expected):
            return False
    return True


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
async def test_pages_arrive_from_another_process(transport: str) -> None:
    async with owner(3, transport) as (child, address):
        pool = planes(None)
        endpoint = await start("reader", pool, transport)
        try:
            instance = await endpoint.connect([address])
            channel = instance.links[0].peer.channel
            assert channel.name is TransportName(transport)
            assert isinstance(channel, StagedChannel) is (transport != "cuda_ipc")
            offer = await instance.offer(0, "r0", "hbm")
            pages = np.random.default_rng(1).permutation(PAGES)
            instance.transfer("r0", [offer], "hbm", pages)
            await instance.complete("r0", 120)
            assert same(pool, pages, 3)
            pool[1].view(-1)[77] += 1
            assert not same(pool, pages, 3)
            assert child.stdin is not None
            second = await instance.offer(0, "r1", "hbm")
            child.stdin.close()
            await child.wait()
            await until(lambda: instance.gone, 60)
            with pytest.raises(PeerGoneError):
                instance.transfer("r1", [second], "hbm", pages)
        finally:
            await endpoint.close()
