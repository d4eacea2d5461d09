"""An instance whose ranks get out of step ends by itself, and a router goes on with the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from hooked_server import FOLDER
from router_rig import FLAGS

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

SERVER = str(Path(__file__).parents[1] / "servers" / "out_of_step_server.py")
ENDS_S = 120


async def test_an_instance_whose_ranks_are_out_of_step_ends_and_others_answer(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    skip = tmp_path / "skip"
    two_ranks = ServerSpec(
        flags=(*FLAGS, "--tp", "2", "--kv-dram-size", "16MB"),
        run=(SERVER,),
        environment={FOLDER: str(tmp_path), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    servers = [ServerProcess(two_ranks), ServerProcess(ServerSpec(flags=FLAGS))]
    try:
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        urls = tuple(server.url for server in servers)
        async with Router(RouterConfig(worker_urls=urls, port=0, policy="round-robin")) as router:

            async def ask(first: int) -> int:
                ids = [first, *range(100, 160)]
                body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
                async with client.post(router.url + "/generate", json=body) as answer:
                    return answer.status

            assert [await ask(number) for number in range(6)] == [200] * 6
            assert all(server.running for server in servers)
            skip.touch()
            async with asyncio.timeout(ENDS_S):
                number = 10
                while servers[0].running:
                    await ask(number)
                    number += 1
            assert "the ranks of this instance are out of step" in servers[0].log.read_text(errors="replace")
            await until(lambda: len(router.fleet.usable()) == 1, 30, "the router to see that it has ended")
            assert [await ask(number) for number in range(1000, 1004)] == [200] * 4
            assert servers[1].running
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
