"""Real SGLang servers for tests and benchmarks: started once per configuration, ended without a trace.

A server runs under ``cluster.guard``: whatever happens to the test process, SIGKILL included, the server and
the processes it started end with it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from sglang_ext.addresses import Ports, bracketed
from sglang_ext.cluster.guard import descendants
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.cluster.process import GUARD, how_it_ended, tail
from sglang_ext.testing.models import DType, model_path
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer
from tests.support.servers import preloaded
from tests.support.servers.ports import free_port

START_SECONDS = 480.0
STOP_SECONDS = 20.0
REQUEST_SECONDS = 180.0
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
GRACE_SECONDS = 1.0
"""SGLang checks only every 5 s for a signal to end; an idle server has nothing to lose."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""For torch, of a server that shares a machine with others: threads spin while they wait for one another's
share of a tiny operator, and where other processes want the cores, spinning takes most of their time."""
HBM_TOKENS = 16_384
"""Of a server whose flags name no size: SGLang's own choice is most of the machine's memory, and filling it
with zeros takes most of a tiny server's start."""
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
"""For SGLang: a server whose count of slots is ever wrong ends."""

T = TypeVar("T")


class ServerStartError(RuntimeError):
    """The server did not come up; the message has the end of its log."""


class ServerDiedError(RuntimeError):
    """A server that should run does not; the message has the end of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """The model, flags and environment of a server. Equal specs can share a server.

    Args:
        model: name of a tiny model (``testing.models``).
        dtype: of the weights and of the KV cache.
        flags: SGLang's flags, and ours.
        environment: on top of the test's own.
        run: arguments of Python: a module behind ``-m``, or a script.
    """

    model: str = "tiny"
    dtype: DType = "float32"
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    run: tuple[str, ...] = ("-m", "sglang_ext.launch_server")

    def command(self, port: int, host: str = LOOPBACK) -> list[str]:
        # SGLang's default is a port that the system also gives to connections, and is bound much later. The
        # replicas of a server each need another one.
        nccl_port = () if "--dp-size" in self.flags else ("--nccl-port", str(free_port()))
        size = () if "--max-total-tokens" in self.flags else ("--max-total-tokens", str(HBM_TOKENS))
        return [
            *(sys.executable, *self.run),
            *("--model-path", str(model_path(self.model, self.dtype)), "--dtype", self.dtype),
            *("--host", host, "--port", str(port)),
            *(*nccl_port, *size, *self.flags),
        ]


class ServerProcess:
    """One server. ``with ServerProcess(spec) as server: ...``, or ``start`` and ``stop``.

    Args:
        spec: model, flags and environment of the server.
        grace_s: seconds between SIGTERM and SIGKILL when it is stopped.
        port: the port that it listens on; a free one by default.
        address: at which it is reached.
        keep_open: whether connections to it stay open for 3 s after a request, as a router's do.
    """

    def __init__(
        self,
        spec: ServerSpec,
        *,
        grace_s: float = GRACE_SECONDS,
        port: int | None = None,
        address: str = LOOPBACK,
        keep_open: bool = False,
    ) -> None:
        self.spec = spec
        self._grace_s = grace_s
        self.port = free_port() if port is None else port
        self.address = address
        self.url = f"http://{bracketed(address)}:{self.port}"
        self._process: preloaded.Handle | None = None
        self._watch: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._client = httpx.Client(
            base_url=self.url,
            timeout=REQUEST_SECONDS,
            trust_env=False,
            # Unless asked for, none stays open: tests look for leaked sockets. So there is nothing to close
            # either, and a request to a server that was stopped meanwhile is refused like any other.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None if keep_open else 0, keepalive_expiry=3.0
            ),
        )

    # -- life -----------------------------------------------------------------------------------

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it serves.

        Raises:
            ServerStartError: it ended, or did not serve in time.
        """
        try:
            with self._own_port():
                self._launch()
                wait_until(self._serves, seconds=START_SECONDS, what=f"start of {self.spec}")
        except (RuntimeError, TimeoutError) as error:
            text = "\n".join(tail(self.log))
            self.stop()
            raise ServerStartError(f"{error}\n{text}") from None
        except BaseException:
            self.stop()
            raise

    @contextmanager
    def _own_port(self) -> Iterator[None]:
        """Reserve the port until the server listens on it, so that no other process gets it meanwhile."""
        with Ports() as ports:
            ports.take(LOOPBACK, self.port, "--port")
            yield

    def _launch(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="server-")
        watch, self._watch = os.pipe()
        try:
            command = self.spec.command(self.port)
            environment = {**ONE_THREAD, **os.environ, **self.spec.environment}
            with self.log.open("wb") as log:
                parent = preloaded.current(self.spec.environment)
                if parent is not None:
                    self._process = parent.launch(
                        command,
                        environment=environment,
                        folder=Path(self._folder.name),
                        log=log.fileno(),
                        watch=watch,
                        grace_s=self._grace_s,
                    )
                    return
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", str(GUARD), str(watch), str(self._grace_s), "--"),
                        *command,
                    ],
                    cwd=self._folder.name,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(watch,),
                    start_new_session=True,
                )
        finally:
            os.close(watch)

    def _serves(self) -> bool:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"the server {how_it_ended(code)}")
        try:
            return self._client.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """End it and everything it started."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._grace_s + STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """PID of the guard; all processes of the server are below it."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "server.log"

    # -- talking to it --------------------------------------------------------------------------

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """POST JSON; the answer's JSON, or its text. Raises on any status that is not 2xx."""
        return _content(self._client.post(path, json=body, headers=headers))

    def get(self, path: str) -> Any:
        """GET; the answer's JSON, or its text. Raises on any status that is not 2xx."""
        return _content(self._client.get(path))

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        stream: bool = False,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """The greedy answer to token ids, with log probabilities and the tokens reused.

        Args:
            prompt: token ids.
            max_new_tokens: exact length of the answer.
            stream: take it as a stream of events; the last one has it all.
            headers: of the request, if it is no stream.
            fields: further fields of the request.
        """
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "return_logprob": True,
            # The runner-up shows whether a token was a close decision.
            "top_logprobs_num": 2,
            "stream": stream,
            **fields,
        }
        if stream:
            return Answer.of(self.last_event("/generate", body))
        return Answer.of(self.post("/generate", body, headers))

    def last_event(self, path: str, body: Mapping[str, Any]) -> Any:
        last = ""
        with self._client.stream("POST", path, json=body) as response:
            if not response.is_success:
                response.read()
                return _content(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    last = data
        return json.loads(last)

    def flush(self) -> None:
        """Empty every tier, once the server is idle."""
        wait_until(lambda: self.asked_to_flush() == 200, seconds=30, what="/flush_cache")

    def asked_to_flush(self) -> int:
        """The status by which `/flush_cache` is answered."""
        return self._client.post("/flush_cache").status_code

    def wait_idle(self) -> None:
        """Return when no request runs or waits."""
        wait_until(
            lambda: all(
                load["num_running_reqs"] == load["num_waiting_reqs"] == 0
                for load in self.get("/v1/loads")["loads"]
            ),
            seconds=60,
            what="idle server",
        )

    def server_info(self) -> Any:
        return self.get("/server_info")

    def metrics(self) -> dict[str, float]:
        """``/metrics`` by sample: 'name{label="value"}' -> value."""
        samples: dict[str, float] = {}
        for line in str(self.get("/metrics")).splitlines():
            match = re.fullmatch(r"([^#\s]\S*(?:\{.*\})?) (\S+)(?: \d+)?", line)
            if match:
                samples[match[1]] = float(match[2])
        return samples

    def pool_calls(self) -> Counter[str]:
        """How often memory pools were called here, by call (MemServe, table 1), over the server's ranks.
        Those that name another instance are `call@peer`."""
        found: Counter[str] = Counter()
        for name, value in self.metrics().items():
            match = re.fullmatch(r'sglang_ext_(cache|pd)_mempool_calls_total\{call="(\w+)",.*', name)
            if match:
                found[match[2] if match[1] == "cache" else f"{match[2]}@peer"] += int(value)
        return found

    def wait_for_pool_calls(self, before: Counter[str], *calls: str) -> None:
        """Until each of these calls has been counted as often as it is named: schedulers export counters once
        a second."""
        wait_until(
            lambda: Counter(calls) <= self.pool_calls() - before,
            seconds=10,
            what=f"calls of the memory pool: {calls}, from {before}",
        )

    @property
    def pids(self) -> list[int]:
        """Ids of the server and of everything it has started."""
        return [self.pid, *descendants(self.pid)]

    def processes(self, title: str) -> list[int]:
        """Ids of the server's processes whose title contains ``title``, such as ``sglang::scheduler``."""
        return [pid for pid in descendants(self.pid) if title in _title(pid)]

    def scheduler_threads(self) -> list[str]:
        """Names of the schedulers' threads, sorted."""
        return sorted(name for pid in self.processes("sglang::scheduler") for name in threads_of(pid))


def threads_of(pid: int) -> list[str]:
    """Names of a process's threads, as the system knows them."""
    return [
        (task / "comm").read_text(encoding="utf-8").strip() for task in Path(f"/proc/{pid}/task").iterdir()
    ]


def ports_and_contexts(scheduler: int) -> tuple[int, int]:
    """A scheduler process's open TCP ports, and its ZeroMQ contexts, which have two threads each. Without
    torch's own: each loop of gloo has a port, and so has the store."""
    inodes = set()
    for link in Path(f"/proc/{scheduler}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(link.readlink().name)
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{scheduler}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]
    ]
    listening = sum(row[3] == LISTENING and f"socket:[{row[9]}]" in inodes for row in rows)
    threads = threads_of(scheduler)
    torch = sum(name in ("gloo_tcp_loop", "pt_tcpstore_uv") for name in threads)
    return listening - torch, threads.count("ZMQbg/Reaper")


def _content(response: httpx.Response) -> Any:
    if not response.is_success:
        raise AssertionError(f"{response.request.url}: {response.status_code}: {response.text[:500]}")
    if response.headers.get("content-type", "").startswith("application/json"):
        return response.json()
    return response.text


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


class ServerPool:
    """Servers by spec, shared between tests; the least recently used one ends when there are too many.

    A server that ends on its own is an error, which the next `get` of its spec or `close` raises.

    Args:
        limit: servers that may run at the same time; each takes about 1.6 GB.
    """

    def __init__(self, limit: int = 2) -> None:
        self._limit = limit
        self._servers: OrderedDict[ServerSpec, ServerProcess] = OrderedDict()

    def get(self, spec: ServerSpec) -> ServerProcess:
        """A running server of this spec: the pooled one, or a new one.

        Raises:
            ServerStartError: it did not come up.
            ServerDiedError: the pooled server has ended. The next call starts a new one.
        """
        server = self._servers.pop(spec, None)
        if server is not None and not server.running:
            self._bury(server)
        if server is None:
            while len(self._servers) >= self._limit:
                self._end(self._servers.popitem(last=False)[1])
            server = ServerProcess(spec)
            server.start()
        self._servers[spec] = server
        return server

    def close(self) -> None:
        """End all of them.

        Raises:
            ServerDiedError: one had ended before.
        """
        with ExitStack() as each:
            for server in self._servers.values():
                each.callback(self._end, server)
            self._servers.clear()

    def _end(self, server: ServerProcess) -> None:
        if server.running:
            server.stop()
        else:
            self._bury(server)

    def _bury(self, server: ServerProcess) -> None:
        text = "\n".join(tail(server.log))
        server.stop()
        raise ServerDiedError(f"{server.spec} ended while tests shared it\n{text}")
