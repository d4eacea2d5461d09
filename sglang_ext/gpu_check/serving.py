"""Step 4: a whole server on this GPU, whose answers from each tier are its cold ones.

It runs with SGLang's defaults, overlap and graphs among them, and ``--enable-deterministic-inference``,
without which log probabilities differ in their last bits by the batch. It is asked with token ids, so that a
model of noise serves as well as a real one.

The prompt is computed twice. An answer of a tier may differ from the computed one as much as the two computed
ones differ from each other, and by ``FLOOR`` where they are equal.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
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
FLOOR = 1e-4
"""Log probabilities that differ by no more are the same, even where two computed answers are equal."""
AGAIN = "gpu-check: computed again"
"""Extra key under which the prompt is computed the first time: the other requests do not find that KV."""
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
    """tier: from where most of the prompt came. seconds: to the first token (TTFT)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tier: str
    seconds: float

    def difference(self, other: Answer) -> float:
        """The largest difference of log probabilities; infinite where tokens or their number differ, or
        where a log probability is not a number."""
        if self.tokens != other.tokens or len(self.logprobs) != len(other.logprobs):
            return math.inf
        apart = [abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)]
        return math.inf if any(map(math.isnan, apart)) else max(apart, default=0.0)


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


def ask(url: str, ids: Sequence[int], tokens: int = ANSWER_TOKENS, *, extra_key: str | None = None) -> Answer:
    """The greedy answer to token ids, streamed.

    extra_key: KV is found only by requests with the same one.
    """
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
        "extra_key": extra_key,
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        seconds, meta = _streamed(response, begin)
    rows = meta["output_token_logprobs"]
    return Answer(
        tuple(row[1] for row in rows),
        # JSON has no NaN: SGLang sends null.
        tuple(math.nan if row[0] is None else row[0] for row in rows),
        _tier(meta, len(ids)),
        seconds,
    )


def _streamed(events: Iterable[bytes], begin: float) -> tuple[float, dict[str, Any]]:
    """Seconds from ``begin`` to the first event, and the last event's ``meta_info``, which has all tokens.

    Raises:
        RuntimeError: the server reported an error instead, or nothing.
    """
    seconds, last = None, None
    for event in events:
        if not event.startswith(b"data: {"):
            continue
        if seconds is None:
            seconds = time.perf_counter() - begin
        last = json.loads(event[len(b"data: ") :])
        if "error" in last:
            raise RuntimeError(f"the server refused the prompt: {last['error']}")
    if seconds is None or last is None:
        raise RuntimeError("the server's answer has no tokens")
    return seconds, last["meta_info"]


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
            # This one first: it compiles kernels, and a small pool keeps only the other for the hit in HBM.
            again = ask(url, prompt, extra_key=AGAIN)
            cold = ask(url, prompt)
            bound = cold.difference(again)
            time.sleep(1.0)
            yield _compared("HBM", cold, ask(url, prompt), bound)
            for _ in range(plan.pool // plan.prompt + 2):
                ask(url, [rng.randrange(100, 30_000) for _ in prompt], 1)
            yield _compared("DRAM", cold, ask(url, prompt), bound)
            time.sleep(2.0)  # until the blocks of DRAM are on disk
        with server(plan) as url:
            yield _compared("disk", cold, ask(url, prompt), bound)
    except StartError as error:
        advice = f"The whole log is in {plan.folder}/server.log while this command runs; --kv-dram-size 0 "
        yield Finding(Level.PROBLEM, "server", str(error), advice + "shows whether SGLang starts without us")


def _compared(tier: str, cold: Answer, found: Answer, bound: float) -> Finding:
    """The verdict on a tier's answer.

    bound: the difference of two computed answers.
    """
    text = f"{tier}: {1000 * found.seconds:.0f} ms to the first token, computed {1000 * cold.seconds:.0f}"
    if found.tier != tier:
        advice = "The answer says nothing of this tier; see the server's log and `sglang-ext doctor`"
        return Finding(Level.WARNING, "server", f"{text}; the prompt came from {found.tier} instead", advice)
    if math.isinf(bound):
        text += "; not compared, because two computed answers have other tokens than each other"
        return Finding(Level.WARNING, "server", text, _UNEQUAL)
    apart, allowed = cold.difference(found), max(bound, FLOOR)
    far = "other tokens" if math.isinf(apart) else f"log probabilities {apart:.1e} apart"
    within = f"{far}; allowed {allowed:.1e}, two computed answers {bound:.1e}"
    if apart > allowed:
        return Finding(
            Level.PROBLEM, "server", f"{text}; ANOTHER ANSWER than when computed: {within}", _WRONG
        )
    return Finding(Level.OK, "server", f"{text}; the same answer: {within}")


_UNEQUAL = (
    "Check whether the server's attention backend is deterministic; `tests/gpu` compares the bytes of KV"
)
_WRONG = "Do not serve with --kv-dram-size on this machine, and report this with the output of --json"
