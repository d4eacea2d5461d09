"""A server of a model, started to be measured and ended afterwards, whatever happens."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sglang_ext.addresses import Ports
from sglang_ext.cluster.process import GUARD, how_it_ended, tail, why_it_ended
from sglang_ext.errors import ConfigError, PeerError

LOOPBACK = "127.0.0.1"
GRACE_S = 5.0
POLL_S = 0.2


def command(model_path: str, port: int, flags: Sequence[str]) -> list[str]:
    """The command line of the server."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name in ("--model-path", "--model", "--host", "--port"):
            raise ConfigError(
                f"{name} is set by calibrate itself", field="--server-args", hint="Leave it out there"
            )
    return [
        *(sys.executable, "-m", "sglang_ext.launch_server", "--model-path", model_path),
        *("--host", LOOPBACK, "--port", str(port), *flags),
    ]


@contextmanager
def started(model_path: str, server_args: Sequence[str], patience_s: float) -> Iterator[str]:
    """The URL of a server of a model.

    Args:
        model_path: as for SGLang.
        server_args: more flags for it.
        patience_s: how long its start may take.

    Raises:
        PeerError: it did not come up; the message has the end of its log.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-ext-calibrate-")))
        log = folder / "server.log"
        with Ports() as ports:
            # Held until the server listens, so that the kernel gives the port to no other process
            # meanwhile.
            port = ports.take(LOOPBACK, 0, "--port")
            process = stack.enter_context(_guarded(command(model_path, port, server_args), log))
            deadline = time.monotonic() + patience_s
            while not _serves(port):
                code = process.poll()
                if code is not None or time.monotonic() > deadline:
                    why = "did not start in time" if code is None else how_it_ended(code)
                    last = "\n".join([*filter(None, [why_it_ended(log)]), *tail(log)])
                    raise PeerError(f"the server of {model_path} {why}:\n{last}")
                time.sleep(POLL_S)
        yield f"http://{LOOPBACK}:{port}"


@contextmanager
def _guarded(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process under ``cluster.guard``: it ends with the block, and with this process."""
    watch, ours = os.pipe()
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*(sys.executable, "-I", "-S", str(GUARD), str(watch), str(GRACE_S), "--"), *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=(watch,),
                start_new_session=True,
            )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(watch)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(4 * GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours)


def _serves(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
