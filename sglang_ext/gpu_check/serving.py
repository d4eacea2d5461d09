"""Step 4: a whole server on this GPU, whose answers from each tier are its cold ones.

It runs with SGLang's defaults, overlap and graphs among them, and ``--enable-deterministic-inference``,
without which log probabilities differ in their last bits by the batch. It is asked with token ids, so that a
model of noise serves as well as a real one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.addresses import Ports
from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.cluster.process import GUARD, tail

START_SECONDS = 300.0
ANSWER_TOKENS = 16
CLOSE = 1e-3
"""Log probabilities of a deterministic server that differ by less are the same."""
FIRST_PORT = 31_900


@dataclass(frozen=True)
class Plan:
    """How the server is started and asked.

    Args:
        model: a folder.
        folder: for its disk tier and its log.
        run: arguments of Python that start a server.
        flags: more of the server's.
        prompt: tokens of the prompt that is asked again and again.
        pool: tokens in HBM.
    """

    model: Path
    folder: Path
    run: Sequence[str] = ("-P", "-m", "sglang_ext.launch_server")
    flags: Sequence[str] = ("--enable-deterministic-inference",)
    prompt: int = 2048
    pool: int = 16_384
    start_seconds: float = START_SECONDS

    def command(self, port: int) -> list[str]:
        return [
            *(sys.executable, *self.run, "--model-path", str(self.model)),
            *("--host", LOOPBACK, "--port", str(port), "--max-total-tokens", str(self.pool)),
            *("--radix-cache-backend", "global", "--kv-dram-size", "2GiB", "--kv-load-policy", "always"),
            *("--kv-disk-path", str(self.folder / "disk"), "--kv-disk-size", "2GB", *self.flags),
        ]


@dataclass(frozen=True)
class Answer:
    """tier: from where most of the prompt came. seconds: until the whole answer was there."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tier: str
    seconds: float

    def same(self, other: Answer) -> bool:
        """Whether both are one answer, by tokens and log probabilities."""
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return self.tokens == other.tokens and all(abs(a - b) <= CLOSE for a, b in pairs)


class StartError(RuntimeError):
    """The server does not serve; the text has the end of its log."""


@contextmanager
def server(plan: Plan) -> Iterator[str]:
    """The URL of a server that runs meanwhile.

    Raises:
        StartError: see there.
    """
    log = plan.folder / "server.log"
    watch, own = os.pipe()
    with Ports() as ports:
        (port,) = ports.free_after(FIRST_PORT, 1)
        guarded = [sys.executable, "-I", "-S", str(GUARD), str(watch), "5", "--", *plan.command(port)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                guarded, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(watch,), cwd=plan.folder
            )
        os.close(watch)
        try:
            url = f"http://{LOOPBACK}:{port}"
            _wait(url, process, plan.start_seconds, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(own)


def _wait(url: str, process: subprocess.Popen[bytes], seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise StartError("the server ended: " + " | ".join(tail(log)[-5:]))
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise StartError(f"the server did not answer in {seconds:.0f} s: " + " | ".join(tail(log)[-5:]))


def ask(url: str, ids: Sequence[int], tokens: int = ANSWER_TOKENS) -> Answer:
    """The greedy answer to token ids."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        meta = json.loads(response.read())["meta_info"]
    seconds = time.perf_counter() - begin
    rows = meta["output_token_logprobs"]
    return Answer(
        tuple(row[1] for row in rows), tuple(row[0] for row in rows), _tier(meta, len(ids)), seconds
    )


def _tier(meta: dict[str, Any], prompt: int) -> str:
    details = meta.get("cached_tokens_details") or {}
    by = {"HBM": "device", "DRAM": "host", "disk": "storage"}
    found = {tier: int(details.get(key) or 0) for tier, key in by.items()}
    tier = max(found, key=lambda name: found[name])
    return tier if found[tier] > prompt / 2 else "computed"


def answers(plan: Plan) -> Iterator[Finding]:
    """A finding for each tier; one problem where the server does not start."""
    rng = random.Random(7)
    prompt = [rng.randrange(100, 30_000) for _ in range(plan.prompt)]
    try:
        with server(plan) as url:
            cold = ask(url, prompt)
            time.sleep(1.0)
            yield _compared("HBM", cold, ask(url, prompt))
            for _ in range(plan.pool // plan.prompt + 2):
                ask(url, [rng.randrange(100, 30_000) for _ in prompt], 1)
            yield _compared("DRAM", cold, ask(url, prompt))
            time.sleep(2.0)  # until the blocks of DRAM are on disk
        with server(plan) as url:
            yield _compared("disk", cold, ask(url, prompt))
    except StartError as error:
        advice = f"The whole log is in {plan.folder}/server.log while this command runs; --kv-dram-size 0 "
        yield Finding(Level.PROBLEM, "server", str(error), advice + "shows whether SGLang starts without us")


def _compared(tier: str, cold: Answer, found: Answer) -> Finding:
    text = f"{tier}: {1000 * found.seconds:.0f} ms, computed {1000 * cold.seconds:.0f}"
    if found.tier != tier:
        advice = "The answer says nothing of this tier; see the server's log and `sglang-ext doctor`"
        return Finding(Level.WARNING, "server", f"{text}; the prompt came from {found.tier} instead", advice)
    if not cold.same(found):
        return Finding(Level.PROBLEM, "server", f"{text}; ANOTHER ANSWER than when computed", _WRONG)
    return Finding(Level.OK, "server", f"{text}; the same answer")


_WRONG = "Do not serve with --kv-dram-size on this machine, and report this with the output of --json"
