"""`sglang-ext cluster` with real SGLang servers: it serves, and however it ends, nothing of it is left."""

from __future__ import annotations

import json
import os
import pwd
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import psutil
import pytest
from listening import (
    AGENT,
    ALONE,
    GLOO,
    HTTP,
    ROUTER,
    STORE,
    TRANSFER,
    beyond_loopback,
    rows,
)

from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import wait_until
from tests.support.lab.hosts import Host

START_S = 300.0
END_S = 60.0
BLOCK = 16
PROMPT_TOKENS = 40 * BLOCK
PROMPTS = 4
OTHER_USER = Path(__file__).parents[1].joinpath("other_user.py")

pytestmark = pytest.mark.timeout(2 * START_S)


@dataclass(frozen=True)
class Machine:
    """The peculiarities of a machine and of the user who starts a cluster on it.

    environment: variables beside those of the tests.
    temporary: name of the folder for temporary files.
    user: the words before a command that run it as another user.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    temporary: str = "tmp"
    user: tuple[str, ...] = ()


NAMELESS = 123_456
"""A user id that the password database does not have."""
AS_NAMELESS = (
    *("setpriv", f"--reuid={NAMELESS}", f"--regid={NAMELESS}", "--clear-groups"),
    # It may read files that only root can, as Python and its packages may lie there, and write none.
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
PROXY = Machine({"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"})
MALFORMED = Machine({"ALL_PROXY": "socks5://"})
ASCII = Machine({"LC_ALL": "C", "PYTHONUTF8": "0"})
DEEP = Machine(temporary="d" * 140)


def without_compiler(folder: Path) -> Machine:
    """A machine with the few programs that a server calls, among them no compiler."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("lscpu", "setpriv"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    return Machine({"PATH": str(programs), "CC": "", "CXX": ""})


def together(*machines: Machine) -> Machine:
    """A machine that is unusual in all of these ways."""
    return Machine(
        {name: value for machine in machines for name, value in machine.environment.items()},
        next((machine.temporary for machine in machines if machine.temporary != "tmp"), "tmp"),
        next((machine.user for machine in machines if machine.user), ()),
    )


class RunningCluster:
    """The command, its output line by line, and every process below it.

    Args:
        folder: of its logs, disks and temporary files.
        arguments, flags: before and after ``--``.
        host: of a lab, on which it runs.
        machine: an unusual one, on which it runs.
        model: name of a tiny model.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        flags: tuple[str, ...] = (),
        host: Host | None = None,
        machine: Machine | None = None,
        model: str = "tiny",
    ) -> None:
        self.log_dir = log_dir = folder / "logs"
        self.disk, self.temporary = folder / "kv", folder / "tmp"
        if machine is not None:
            self.temporary = folder / machine.temporary
        self.temporary.mkdir(exist_ok=True)
        if machine is not None and machine.user:
            for path in (folder, self.temporary):
                path.chmod(0o1777)
        command = [
            *(machine.user if machine is not None else ()),
            *(sys.executable, "-m", "sglang_ext.cli", "cluster", "--model-path", str(model_path(model))),
            *("--port", "0", "--log-dir", str(log_dir), *arguments),
            *("--", "--max-total-tokens", "8192", "--kv-dram-size", "64MB"),
            *("--kv-disk-path", str(self.disk), "--kv-disk-size", "1GB", *flags),
        ]
        self.process = (
            host.popen(command, stdout=subprocess.PIPE)
            if host is not None
            else subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **(machine.environment if machine is not None else {}),
                    "TMPDIR": str(self.temporary),
                },
                umask=0,  # nothing is to depend on it
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="output of the cluster")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.decode(errors="replace"))
        self._lines.put(None)

    def wait_for_line(self, pattern: str, seconds: float) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line is not None, f"ended without {pattern!r}:\n{''.join(self.output)}"
            self.output.append(line)
            if match := re.search(pattern, line):
                return match

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(END_S)
        self._reader.join(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not below the folder of the tests: others cannot enter that, whatever is in it.
    with tempfile.TemporaryDirectory(prefix="cluster-", dir="/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def open_to_others(processes: Iterable[psutil.Process], *paths: Path | str) -> list[str]:
    """The resources among these that the user ``nobody`` can open, a line for each."""
    pids = ",".join(str(process.pid) for process in processes)
    nobody = pwd.getpwnam("nobody").pw_uid
    words = ["python3", "-I", "-S", "-", pids, *map(str, paths)]
    done = subprocess.run(
        words, input=OTHER_USER.read_text(), user=nobody, group=nobody, extra_groups=(), cwd="/",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    maps = {Path(each.path) for process in processes for each in process.memory_maps()}
    return {path for path in maps if path.is_relative_to("/dev/shm") and path.exists()}


def keeps_to_itself(cluster: RunningCluster, below: list[psutil.Process], where: dict[str, str]) -> None:
    """Nothing of it is open to other users of the machine but the router, and its keys are in no list of
    processes."""
    secrets = [key.read_text() for key in cluster.temporary.glob("sglang-ext-run-*/*.key")]
    assert len(secrets) == 2
    shown = [" ".join(process.cmdline()) for process in below]
    assert not [words for words in shown if any(secret in words for secret in secrets)]
    listening = [process.pid for process in below]
    assert beyond_loopback(listening) == []
    found = rows(listening)
    assert found.pop(GLOO) > 0
    assert found == Counter({ROUTER: 1, ALONE: 2, HTTP: 2, AGENT: 2, TRANSFER: 4, STORE: 2})
    folders = (cluster.temporary, cluster.log_dir, cluster.disk)
    for folder in folders:
        assert sum(path.is_file() for path in folder.rglob("*")) > 0, folder
    written = [path.read_text() for path in cluster.log_dir.iterdir()]
    assert not [log for log in written if any(secret in log for secret in secrets)]
    if os.geteuid() != 0:
        return  # only root can become another user
    servers = [url for name, url in where.items() if name.startswith("server")]
    assert open_to_others(below, *folders, *shared_memory_of(below), *servers) == []
    # The twin: it sees a file that is not protected, a router without keys, and a process of its own.
    (cluster.temporary / "open").write_text("")
    seen = open_to_others((), cluster.temporary, where["router"])
    assert seen == [f"{cluster.temporary / 'open'}: read", f"{where['router']}: 200"]


def registers(url: str) -> int:
    """The status that a stranger gets for registering an instance."""
    body = {"url": "http://127.0.0.1:1", "instance": "false", "epoch": "0" * 32, "agent": "tcp://127.0.0.1:2"}
    request = urllib.request.Request(
        f"{url}/cluster/instances", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return sent(url, body)[0]


def sent(
    url: str, body: dict[str, Any], more: dict[str, str] | None = None
) -> tuple[dict[str, Any], Message]:
    """The answer to a request, and its headers."""
    headers = {"content-type": "application/json", **(more or {})}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found, response.headers


def json_of(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer to a GET, or to a POST of a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def addresses(cluster: RunningCluster, routers: int = 0) -> dict[str, str]:
    """The URLs of routers and servers, as the cluster prints them when it is ready."""
    url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
    found = {"router": url}
    for _ in range(2 + routers):
        match = cluster.wait_for_line(r"((?:server|router)-\d) +(http://\S+)", END_S)
        found[match[1]] = match[2]
    return found


def blocks_on_disk(router: str) -> int:
    instances = json_of(f"{router}/cluster")["instances"]
    return sum(instance["tiers"]["disk"]["used"] for instance in instances if "disk" in instance["tiers"])


def prompt(number: int) -> dict[str, Any]:
    """A request whose prompt nothing else begins with."""
    tokens = [(number * 4001 + 7 * place) % 30_000 + 100 for place in range(PROMPT_TOKENS)]
    return {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}


def test_serves_is_gone_after_a_kill_and_finds_its_disks_again(folder: Path) -> None:
    """Ready means ready: the first requests of a restarted cluster go to the servers that have their KV. One
    of two routers dies, and in the end a scheduler."""
    kv = ("--kv-load-policy", "always")
    two = ("--colocated", "2", "--routers", "2", "--restart", "1")
    with closing(RunningCluster(folder, *two, flags=kv)) as cluster:
        where = addresses(cluster, routers=2)
        url, names = where["router"], {address: name for name, address in where.items()}
        # Through one router, which knows its own placements at once.
        cold = [sent(where["router-0"], prompt(number)) for number in range(PROMPTS)]
        holders = [names[headers["x-kv-instance"]] for _, headers in cold]
        assert all(answer["meta_info"]["cached_tokens"] == 0 for answer, _ in cold)
        assert set(holders) == {"server-0", "server-1"}
        warm = ask(url, prompt(0))
        assert warm["output_ids"] == cold[0][0]["output_ids"]
        assert warm["meta_info"]["cached_tokens"] == PROMPT_TOKENS - BLOCK
        whole = PROMPTS * PROMPT_TOKENS // BLOCK
        wait_until(lambda: blocks_on_disk(url) >= whole, seconds=END_S, what="everything on disk")

        a_hint_is_known_to_both_routers(where)
        a_dead_router_is_missed_by_nobody(cluster, url, [answer for answer, _ in cold])
        below = cluster.below()
        keeps_to_itself(cluster, below, where)
        assert registers(url) == 401
        kinds = [process.name() for process in below]
        assert sum("sched" in kind for kind in kinds) == 2, kinds
        assert len(below) >= 10, kinds  # guards, servers, schedulers, detokenizers, router
        cluster.process.kill()
        _, left = psutil.wait_procs(below, timeout=END_S)
        assert left == []

    # The machine is unusual now: behind a proxy, with a deep TMPDIR, in ASCII, without a compiler.
    machine = together(PROXY, MALFORMED, ASCII, DEEP, without_compiler(folder))
    with closing(RunningCluster(folder, "--colocated", "2", flags=kv, machine=machine)) as cluster:
        where = addresses(cluster)
        url, names = where["router"], {address: name for name, address in where.items()}
        # First those of the server that an idle cluster without knowledge would not have chosen.
        order = sorted(range(PROMPTS), key=lambda number: holders[number], reverse=True)
        found = {number: sent(url, prompt(number)) for number in order}
        reasons = {number: headers["x-kv-route-reason"] for number, (_, headers) in found.items()}
        assert {number: names[headers["x-kv-instance"]] for number, (_, headers) in found.items()} == dict(
            enumerate(holders)
        ), reasons
        # Both, where the routers' deaths above had a busy server's prompt computed at the other, too.
        assert set(reasons.values()) <= {"prefix", "prefix-shared"}
        for number, (answer, _) in found.items():
            meta = answer["meta_info"]
            assert answer["output_ids"] == cold[number][0]["output_ids"]
            assert meta["cached_tokens"] == PROMPT_TOKENS - BLOCK
            assert meta["cached_tokens_details"]["storage"] == PROMPT_TOKENS - BLOCK, meta
        a_dead_scheduler_ends_it_and_is_named(cluster)


def nameless() -> Machine:
    """A machine on which a user without a name and a home starts the cluster."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can run as another user, by setpriv")
    return Machine(
        dict.fromkeys(("USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME"), "") | {"HOME": "/"},
        user=AS_NAMELESS,
    )


def answers_on(machine: Machine, folder: Path) -> None:
    """A cluster of one server starts there, answers twice the same, and leaves nothing behind."""
    with closing(RunningCluster(folder, machine=machine)) as cluster:
        url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
        first, second = ask(url, prompt(0)), ask(url, prompt(0))
        assert first["output_ids"] == second["output_ids"]
        assert second["meta_info"]["cached_tokens"] == PROMPT_TOKENS - BLOCK
        below = cluster.below()
        cluster.process.terminate()
        assert cluster.process.wait(END_S) == 0
        _, left = psutil.wait_procs(below, timeout=END_S)
        assert left == []
    assert {path.name for path in cluster.temporary.iterdir()} <= {f"sglang-ext-cache-{NAMELESS}"}


@pytest.mark.long
def test_a_user_without_a_name_and_a_home_can_start_a_cluster(folder: Path) -> None:
    answers_on(nameless(), folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "machine", [PROXY, MALFORMED, ASCII, DEEP, None], ids=["proxy", "malformed", "ascii", "deep", "compiler"]
)
def test_a_cluster_starts_on_an_unusual_machine(folder: Path, machine: Machine | None) -> None:
    answers_on(machine or without_compiler(folder), folder)


@pytest.mark.long
def test_a_cluster_starts_on_a_machine_that_is_unusual_in_every_way(folder: Path) -> None:
    answers_on(together(PROXY, MALFORMED, ASCII, DEEP, without_compiler(folder), nameless()), folder)


def a_hint_is_known_to_both_routers(where: dict[str, str]) -> None:
    """One router takes the hint; the other sends its request to that server, and reports the outcome."""
    hint = {"input_ids": prompt(0)["input_ids"], "session": "told to one"}
    told = json_of(f"{where['router-0']}/v1/advisory", hint)
    at_the_other = f"{where['router-1']}/v1/advisory/{told['id']}"
    wait_until(lambda: status_of(at_the_other) == 200, seconds=END_S, what="the hint at the other router")
    _, headers = sent(where["router-1"], prompt(0), {"x-session-id": "told to one"})
    assert (headers["x-kv-route-reason"], headers["x-kv-instance"]) == ("advised", told["instance"])
    for router in ("router-0", "router-1"):
        url = f"{where[router]}/v1/advisory/{told['id']}"
        wait_until(lambda url=url: json_of(url)["state"] == "used", seconds=END_S, what="it is used")


def a_dead_router_is_missed_by_nobody(
    cluster: RunningCluster, url: str, answers: list[dict[str, Any]]
) -> None:
    """Requests that wait at the port of a killed router, and all later ones, are answered by the other."""
    commands = [(process, " ".join(process.cmdline())) for process in cluster.below()]
    routers = [each for each, words in commands if "sglang_ext.router" in words and "guard.py" not in words]
    assert len(routers) == 2
    port = int(url.rpartition(":")[2])
    with ThreadPoolExecutor() as pool:
        for router in routers:
            router.suspend()
        waiting = [pool.submit(ask, url, prompt(number)) for number in range(len(answers))]
        wait_until(
            lambda: len(connections_to(port)) >= len(answers), seconds=END_S, what="requests at the port"
        )
        routers[0].kill()
        routers[1].resume()
        for after, before in zip(waiting, answers, strict=True):
            assert after.result()["output_ids"] == before["output_ids"]
            assert after.result()["meta_info"]["cached_tokens"] == PROMPT_TOKENS - BLOCK
    for number, before in enumerate(answers):
        assert ask(url, prompt(number))["output_ids"] == before["output_ids"]
    cluster.wait_for_line("the cluster is complete again", START_S)


def connections_to(port: int) -> list[Any]:
    """Those of this process to a port of this machine."""
    found = psutil.Process().net_connections()
    return [each for each in found if each.raddr and each.raddr.port == port]


def a_dead_scheduler_ends_it_and_is_named(cluster: RunningCluster) -> None:
    cluster.wait_for_line("Ctrl-C ends it", START_S)
    below = cluster.below()
    scheduler, _ = [process for process in below if "sched" in process.name()]
    scheduler.send_signal(signal.SIGKILL)
    server = cluster.wait_for_line(r"sglang-ext cluster: (server-\d) was killed by signal 9", END_S)[1]
    cluster.wait_for_line(re.escape(str(cluster.log_dir / f"{server}.log")), END_S)
    cluster.wait_for_line("scheduler_0 .* crashed", END_S)
    assert cluster.process.wait(END_S) == 1
    _, left = psutil.wait_procs(below, timeout=END_S)
    assert left == []
