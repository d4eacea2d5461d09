"""The router as a program."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys

import aiohttp
import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.router.__main__ import main
from sglang_ext.router.config import RouterConfig
from tests.support.servers.ports import free_port
from tests.support.servers.workers import Gate

pytestmark = pytest.mark.slow


def test_a_wrong_flag_ends_it_with_2_and_the_flags_name(capsys) -> None:
    assert main(["--worker-urls", "http://127.0.0.1:1", "--host", "0.0.0.0"]) == 2
    error = capsys.readouterr().err
    assert "--api-key" in error
    assert "0.0.0.0" in error


def from_flags(*flags: str) -> RouterConfig:
    return RouterConfig.parse(flags)


def test_keys_need_not_be_on_the_command_line(tmp_path, monkeypatch) -> None:
    for name in ("ROUTER", "WORKER"):
        monkeypatch.delenv(f"SGLANG_EXT_{name}_API_KEY", raising=False)
    assert from_flags().api_key is None
    file = tmp_path / "key"
    file.write_text("from a file\n")
    file.chmod(0o600)
    found = from_flags("--api-key-file", str(file), "--worker-api-key-file", str(file))
    assert (found.api_key, found.worker_api_key) == ("from a file", "from a file")
    monkeypatch.setenv("SGLANG_EXT_ROUTER_API_KEY", "from a variable")
    monkeypatch.setenv("SGLANG_EXT_WORKER_API_KEY", "")
    found = from_flags()
    assert (found.api_key, found.worker_api_key) == ("from a variable", None)
    assert from_flags("--api-key", "given").api_key == "given"
    with pytest.raises(ConfigError, match="given twice"):
        from_flags("--api-key", "given", "--api-key-file", str(file))
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        from_flags("--api-key-file", str(file))
    assert caught.value.field == "--api-key-file"


def test_an_unknown_flag_is_refused_by_name(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--worker-urls", "http://127.0.0.1:1", "--no-such-flag"])
    assert caught.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


async def python(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )


async def test_importing_it_is_light() -> None:
    """No torch, no transformers, no SGLang: a router may run where none of them is needed."""
    process = await python(
        "-c", "import sglang_ext.router, sys; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    )
    out, _ = await process.communicate()
    modules = set(out.decode().split())
    assert "sglang_ext" in modules
    assert not modules & {"torch", "transformers", "sglang", "numba"}


async def ended(process: asyncio.subprocess.Process) -> str:
    """Stop it; returns its log."""
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    log = errors.decode()
    assert process.returncode == 0, log
    return log


async def killed(process: asyncio.subprocess.Process) -> None:
    """Leave nothing behind of a test that failed."""
    if process.returncode is None:
        process.kill()
        await process.wait()


async def test_it_serves_until_it_is_stopped(start_worker, client, eventually) -> None:
    worker = await start_worker()
    port = free_port()
    process = await python("-m", "sglang_ext.router", "--worker-urls", worker.url, "--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(60):
            while True:
                try:
                    async with client.get(url + "/health") as answer:
                        assert answer.status == 200
                        break
                except OSError:
                    await asyncio.sleep(0.05)
        body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
        async with client.post(url + "/generate", json=body) as answer:
            assert answer.status == 200
            assert answer.headers["x-kv-instance"] == worker.url
        log = await ended(process)
    finally:
        await killed(process)
    (line,) = [line for line in log.splitlines() if "path=/generate" in line]
    assert "status=200" in line
    assert f"instance={worker.url}" in line
    assert "reason=no-prefix" in line
    assert "Traceback" not in log


async def test_workers_of_two_models_end_it_with_2(start_worker) -> None:
    one, two = await start_worker(vocab_size=10), await start_worker(vocab_size=20)
    process = await python("-m", "sglang_ext.router", "--worker-urls", one.url, two.url, "--port", "0")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"vocab_size" in errors
    assert b"--worker-urls" in errors
    assert b"Traceback" not in errors


async def test_a_port_that_is_taken_is_named(start_worker) -> None:
    worker = await start_worker()
    taken = worker.url.rpartition(":")[2]
    process = await python("-m", "sglang_ext.router", "--worker-urls", worker.url, "--port", taken)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"--port" in errors
    assert taken.encode() in errors


async def test_hanging_up_reads_the_keys_again(start_worker, client, tmp_path) -> None:
    worker = await start_worker()
    port, path = free_port(), tmp_path / "keys.toml"

    def write(key: str) -> None:
        path.write_text(f'[[keys]]\nkey = "{key}"\ntenant = "t"\n')
        path.chmod(0o600)

    write("sk-first-key")
    arguments = ("--worker-urls", worker.url, "--port", str(port), "--api-keys-file", str(path))
    process = await python("-m", "sglang_ext.router", *arguments)

    async def until_accepted(key: str) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    headers = {"authorization": f"Bearer {key}"}
                    async with client.get(f"http://127.0.0.1:{port}/v1/models", headers=headers) as answer:
                        if answer.status == 200:
                            return
                except OSError:
                    pass
                await asyncio.sleep(0.05)

    try:
        await until_accepted("sk-first-key")
        write("sk-second-key")
        process.send_signal(signal.SIGHUP)
        await until_accepted("sk-second-key")
        async with client.get(
            f"http://127.0.0.1:{port}/v1/models", headers={"authorization": "Bearer sk-first-key"}
        ) as answer:
            assert answer.status == 401
        path.write_text("[[")
        process.send_signal(signal.SIGHUP)
        await until_accepted("sk-second-key")
        log = await ended(process)
    finally:
        await killed(process)
    assert "sk-first-key" not in log
    assert "sk-second-key" not in log
    assert "not valid TOML" in log


async def test_few_open_files_refuse_requests_and_reset_no_connection(start_worker, client) -> None:
    """150 requests at once with ``ulimit -n 256``: each is answered, those too many with 503."""
    worker = await start_worker()
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'ulimit -n 256 && exec "$0" "$@"', sys.executable, "-m", "sglang_ext.router"),
        *("--worker-urls", worker.url, "--port", str(port)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}

    async def ready() -> bool:
        try:
            async with client.get(url + "/ready") as answer:
                return bool(answer.status == 200)
        except aiohttp.ClientError:
            return False

    async def ask(number: int) -> tuple[int, str | None]:
        async with many.post(f"{url}/generate", json={**body, "rid": str(number)}) as answer:
            await answer.read()
            return answer.status, answer.headers.get("retry-after")

    try:
        while not await ready():
            assert process.returncode is None
            await asyncio.sleep(0.05)
        worker.before_head = Gate()
        patience = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patience) as many:
            asked = [asyncio.create_task(ask(number)) for number in range(150)]
            refused = [await answer for answer in itertools.islice(asyncio.as_completed(asked), 90)]
            assert set(refused) == {(503, "1")}
            worker.before_head.open()
            answers = await asyncio.gather(*asked)
        assert set(answers) == {(503, "1"), (200, None)}
    finally:
        await killed(process)
