"""The examples for agents' libraries, each with the real package in an environment of its own (long form).

One tiny server serves all. Packages are installed with pip: where they cannot be, tests are skipped with its
words.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from router_rig import FLAGS, ROOT

from sglang_ext.router import Router, RouterConfig
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(2400)]

EXAMPLES = ROOT / "examples" / "agents"
PACKAGES = {
    "openai_sdk": ("openai",),
    "anthropic_sdk": ("anthropic",),
    "openai_agents_sdk": ("openai-agents",),
    "langgraph_agent": ("langgraph", "langchain", "langchain-openai"),
    "litellm_sdk": ("litellm",),
    "litellm_proxy": ("litellm[proxy]",),
    "open_webui": ("open-webui",),
}
BLOCK = 16


@pytest.fixture(scope="module")
def server(get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    return get_server(ServerSpec(flags=(*FLAGS, "--tool-call-parser", "qwen25")))


@pytest.fixture
async def router(server: ServerProcess) -> AsyncIterator[Router]:
    server.flush()
    router = Router(RouterConfig(worker_urls=(server.url,), port=0))
    await router.start()
    yield router
    router.check()
    await router.stop()


def run(command: list[str | Path], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program without this environment's own packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run(
        [str(word) for word in command],
        env=environment, capture_output=True, text=True, check=False, timeout=seconds,
    )  # fmt: skip


def environment_of(name: str, folder: Path) -> Path:
    """The Python of a new virtual environment with an example's packages."""
    python = folder / "venv" / "bin" / "python"
    made = run([sys.executable, "-m", "venv", folder / "venv"], 300)
    assert made.returncode == 0, made.stderr
    installed = run(
        [python, "-m", "pip", "install", "--quiet", ROOT / "clients/python", *PACKAGES[name]], 1800
    )
    if installed.returncode:
        pytest.skip(f"{' '.join(PACKAGES[name])} cannot be installed: {installed.stderr.strip()[-300:]}")
    return python


@pytest.mark.parametrize("name", PACKAGES)
async def test_turns_of_the_real_package_find_each_other(name: str, router: Router, tmp_path: Path) -> None:
    python = await asyncio.to_thread(environment_of, name, tmp_path)
    done = await asyncio.to_thread(run, [python, EXAMPLES / f"{name}.py", router.url], 600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    *turns, versions = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(turns) == 3
    # The last block of a prompt is computed: its generation prompt gives way to the answer's message.
    for before, turn in itertools.pairwise(turns):
        assert turn["cached"] >= before["prompt"] // BLOCK * BLOCK - BLOCK > 100, turns
    print(versions)


def test_every_example_is_run() -> None:
    """The short list is the folder's."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PACKAGES)
