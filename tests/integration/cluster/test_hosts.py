"""A cluster over hosts that share nothing: a router and real servers, bound to every address of their hosts.

Hosts have equal names that mean nothing to the others, clocks that are minutes apart, no port open but the
documented ones, and two networks, one of them for KV alone.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hooked_server import FOLDER
from pd_fleet import FaultySpec, fault
from token_requests import random_prompt

from sglang_ext.addresses import bracketed
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.lab import clock
from tests.support.lab.hosts import Lab, why_not
from tests.support.servers.server import ONE_THREAD, ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

PORT, BOOTSTRAP, PORTS = 30_000, 8998, "31000-31009"
API_KEY = "the-key-of-clients"
POOL = ("--max-total-tokens", "6000", "--chunked-prefill-size", "256", "--kv-check")
COLOCATED = ("--radix-cache-backend", "global", "--kv-dram-size", "32MiB")
BACKEND = ("--disaggregation-transfer-backend", "global")
PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(BOOTSTRAP), *BACKEND)
DECODE = ("--disaggregation-mode", "decode", *BACKEND)
APART = (PREFILL, DECODE)
TOKENS = 8
HOSTS = ("r", "a", "b")
CLOCKS = {"a": 90.0, "b": -90.0}
OPEN = {"r": (PORT,), **dict.fromkeys(("a", "b"), (PORT, BOOTSTRAP, *range(31_000, 31_010)))}
MASK = "10.77.0.99"
"""Behind which the last host is, where one is."""
FAULTY = FaultySpec.run


class Fleet:
    """A router on the first host of a lab, a server on each of the others.

    Args:
        flags: of each server.
        family: of the addresses.
        masked: whether the last host is behind `MASK`.
        folder: for logs and faults; shared with all hosts.
    """

    def __init__(
        self, lab: Lab, key_file: Path, folder: Path, family: int, masked: bool, *flags: tuple[str, ...]
    ) -> None:
        self.lab, self._folder = lab, folder
        wildcard = "::" if family == 6 else "0.0.0.0"
        address = lab["r"].address("lan", family)
        self._url = f"http://{bracketed(address)}:{PORT}"
        router = ("--host", wildcard, "--port", str(PORT), "--cluster-key-file", str(key_file))
        self._start("r", "-m", "sglang_ext.router", *router, "--api-key", API_KEY)
        for name, more in zip(HOSTS[1:], flags, strict=True):
            (folder / name).mkdir()
            self._start(
                *(name, *FAULTY, "--model-path", str(model_path("tiny", "float32"))),
                *("--dtype", "float32", "--host", wildcard, "--port", str(PORT), *POOL, *more),
                *("--kv-router", self._url, "--kv-cluster-key-file", str(key_file)),
                *("--kv-ports", PORTS),
                *(() if masked else ("--kv-data-interface", "kv")),
                *(("--kv-announce-host", MASK) if masked and name == HOSTS[-1] else ()),
            )

    def _start(self, host: str, *arguments: str) -> None:
        environment = {**os.environ, FOLDER: str(self.faults(host))}
        self.lab[host].popen([sys.executable, *arguments], log=self.log(host), environment=environment)

    def faults(self, host: str) -> Path:
        """Where a server looks for its faults (`faulty_pd_server`)."""
        return self._folder / host

    def log(self, host: str) -> Path:
        return self._folder / f"{host}.log"

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """A request from the router's host to the router."""
        with self.lab["r"].network(), httpx.Client(trust_env=False, timeout=120) as client:
            headers = {"authorization": f"Bearer {API_KEY}"}
            return client.request(method, self._url + path, json=body, headers=headers)

    def ready(self) -> bool:
        try:
            return self.ask("GET", "/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def instances(self) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/cluster/instances").json()["instances"])

    def usable(self) -> int:
        return sum(each["usable"] for each in self.instances())

    def generate(self, prompt: list[int]) -> Answer:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = self.ask("POST", "/generate", body)
        assert answer.status_code == 200, answer.text
        return Answer.of(answer.json())

    def logs(self) -> str:
        return "\n".join(f"== {name}\n{self.log(name).read_text()[-6000:]}" for name in HOSTS)


@pytest.fixture
def lab(tmp_path: Path, family: int) -> Iterator[Lab]:
    if reason := why_not() or clock.why_not():
        pytest.skip(reason)
    with Lab(
        *HOSTS,
        hostnames=dict.fromkeys(HOSTS, "node"),
        shared=[tmp_path],
        families=(family,),
        networks=("lan", "kv"),
        clocks=CLOCKS,
    ) as lab:
        for host, ports in OPEN.items():
            lab.close_ports(host, but=ports)
        yield lab


@pytest.mark.parametrize(
    ("family", "masked", "flags"),
    [
        pytest.param(4, False, (COLOCATED, COLOCATED), id="colocated"),
        pytest.param(4, False, APART, id="apart"),
        pytest.param(4, True, APART, id="apart-masked"),
        pytest.param(6, False, APART, id="apart-IPv6"),
    ],
)
def test_hosts_serve_one_cluster(
    lab: Lab,
    key_file: Path,
    tmp_path: Path,
    family: int,
    masked: bool,
    flags: tuple[tuple[str, ...], ...],
    truth: ServerProcess,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers equal those of one server, and each server is registered under its announced address. The twin,
    with prefill and decode apart: one bit of the KV that decode has read is inverted."""
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    if masked:
        lab.mask(HOSTS[-1], MASK)
    fleet = Fleet(lab, key_file, tmp_path, family, masked, *flags)
    try:
        wait_until(lambda: fleet.ready() and fleet.usable() == 2, seconds=300, what="both servers")
        for _ in range(3):
            prompt = random_prompt(rng, 200)
            assert_same(truth.generate(prompt, max_new_tokens=TOKENS), fleet.generate(prompt))
        if flags == APART:
            prompt = random_prompt(rng, 200)
            with fault(fleet.faults("b"), "damage"):
                damaged = fleet.generate(prompt)
            with pytest.raises(AssertionError):
                assert_same(truth.generate(prompt, max_new_tokens=TOKENS), damaged)
        found = {each["url"] for each in fleet.instances()}
        a, b = (bracketed(lab[name].address("lan", family)) for name in HOSTS[1:])
        hosts = [a, MASK if masked else b]
        assert found == {f"http://{host}:{PORT}" for host in hosts}
        assert len({each["instance"] for each in fleet.instances()}) == 2
    except BaseException:
        sys.stderr.write(fleet.logs())
        raise


@pytest.mark.parametrize("family", [4])
def test_a_server_on_loopback_ends_with_the_way_out(lab: Lab, key_file: Path) -> None:
    """SGLang's default host, with the router on another machine."""
    command = [
        *(sys.executable, "-m", "sglang_ext.launch_server"),
        *("--model-path", str(model_path("tiny", "float32")), *COLOCATED),
        *("--kv-router", f"http://{lab['r'].address()}:{PORT}", "--kv-cluster-key-file", str(key_file)),
    ]
    with pytest.raises(subprocess.CalledProcessError) as error:
        lab["a"].run("sh", "-c", '"$@" 2>&1', "sh", *command, seconds=120)
    assert "Give --host 0.0.0.0" in error.value.output.decode()
