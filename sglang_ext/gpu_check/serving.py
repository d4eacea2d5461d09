"""Steps 4 and 5: a whole server on this GPU, whose answers from each tier are its computed ones, and a
prefill and a decode server on it, whose answers are those too.

They run with SGLang's defaults, overlap and graphs among them, and ``--enable-deterministic-inference``,
without which log probabilities differ in their last bits by the batch. They are asked with token ids, so that
a model of noise serves as well as a real one.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ext.addresses import Ports
from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.cluster.plan import LOOPBACK, TRANSFER_FLAG
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
    """How servers are started and asked.

    Args:
        model: a folder.
        folder: for the disk tier and logs.
        run: arguments of Python that start a server.
        flags: more of each server's.
        prompt: tokens of the prompt that is asked again and again.
        pool: tokens in HBM.
        pair: whether prefill and decode are tried apart.
    """

    model: Path
    folder: Path
    run: Sequence[str] = ("-P", "-m", "sglang_ext.launch_server")
    flags: Sequence[str] = ("--enable-deterministic-inference",)
    prompt: int = 2048
    pool: int = 16_384
    pair: bool = False
    start_seconds: float = START_SECONDS

    @property
    def tiers(self) -> tuple[str, ...]:
        """Flags of a server with HBM, DRAM and disk."""
        return (
            *("--radix-cache-backend", "global", "--kv-load-policy", "always"),
            *("--kv-disk-path", str(self.folder / "disk"), "--kv-disk-size", "2GB"),
        )

    def command(self, port: int, flags: Sequence[str]) -> list[str]:
        return [
            *(sys.executable, *self.run, "--model-path", str(self.model)),
            *("--host", LOOPBACK, "--port", str(port), "--max-total-tokens", str(self.pool)),
            *("--kv-dram-size", "2GiB", *flags, *self.flags),
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
def servers(plan: Plan, parts: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """The URLs of servers that run meanwhile, all started at once.

    Args:
        parts: the flags of each by its name, after which its log is called.

    Raises:
        StartError: one of them does not serve.
    """
    with ExitStack() as running:
        with Ports() as ports:
            places = ports.free_after(FIRST_PORT, len(parts))
            begun = [
                running.enter_context(_process(plan, plan.folder / f"{name}.log", port, flags))
                for port, (name, flags) in zip(places, parts.items(), strict=True)
            ]
        urls = [f"http://{LOOPBACK}:{port}" for port in places]
        for url, process, name in zip(urls, begun, parts, strict=True):
            _wait(url, process, plan.start_seconds, plan.folder / f"{name}.log")
        yield urls


@contextmanager
def _process(plan: Plan, log: Path, port: int, flags: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    watch, own = os.pipe()
    guarded = [sys.executable, "-I", "-S", str(GUARD), str(watch), "5", "--", *plan.command(port, flags)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            guarded, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(watch,), cwd=plan.folder
        )
    os.close(watch)
    try:
        yield process
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
            raise StartError(f"the {log.stem} ended: " + " | ".join(tail(log)[-5:]))
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise StartError(f"the {log.stem} did not answer in {seconds:.0f} s: " + " | ".join(tail(log)[-5:]))


def ask(
    url: str,
    ids: Sequence[int],
    tokens: int = ANSWER_TOKENS,
    *,
    extra_key: str | None = None,
    pair: Mapping[str, object] | None = None,
) -> Answer:
    """The greedy answer to token ids, streamed.

    Args:
        extra_key: KV is found only by requests with the same one.
        pair: fields by which a prefill and a decode server find each other.
    """
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
        "extra_key": extra_key,
        **(pair or {}),
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


def ask_pair(prefill: str, decode: str, bootstrap_port: int, ids: Sequence[int]) -> Answer:
    """Decode's answer to token ids whose KV prefill hands over, with the tier in which prefill found them."""
    number = random.randrange(1, 1 << 63)
    pair = {"bootstrap_host": LOOPBACK, "bootstrap_port": bootstrap_port, "bootstrap_room": number}
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(ask, prefill, ids, pair=pair)
        answer = ask(decode, ids, pair=pair)
        return replace(answer, tier=first.result().tier)


def answers(plan: Plan) -> Iterator[Finding]:
    """A finding for each tier, and one for prefill and decode apart if they are tried; one problem where a
    server does not start."""
    rng = random.Random(7)
    prompt = [rng.randrange(100, 30_000) for _ in range(plan.prompt)]
    try:
        with servers(plan, {"server": plan.tiers}) as (url,):
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
        with servers(plan, {"server": plan.tiers}) as (url,):
            yield _compared("disk", cold, ask(url, prompt), bound)
    except StartError as error:
        yield _not_started(error, "server", plan, "--kv-dram-size 0 shows whether SGLang starts without us")
        return
    if plan.pair:
        yield from _apart(plan, prompt, cold, bound)


def _apart(plan: Plan, prompt: Sequence[int], cold: Answer, bound: float) -> Iterator[Finding]:
    """Step 5: prefill and decode on this GPU. Prefill computes the prompt, and then has it in HBM."""
    apart = (TRANSFER_FLAG, "global", "--disaggregation-mode")
    try:
        with Ports() as ports:
            (bootstrap,) = ports.free_after(FIRST_PORT + 100, 1)
            prefill = (*apart, "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
            with servers(plan, {"prefill": prefill, "decode": (*apart, "decode")}) as urls:
                for tier in ("computed", "HBM"):
                    answer = ask_pair(urls[0], urls[1], bootstrap, prompt)
                    yield _compared(tier, cold, answer, bound, apart=True)
    except StartError as error:
        yield _not_started(error, "prefill/decode", plan, "`sglang-ext doctor` looks at flags and transports")


def _not_started(error: StartError, subject: str, plan: Plan, advice: str) -> Finding:
    logs = f"The whole logs are in {plan.folder} while this command runs"
    return Finding(Level.PROBLEM, subject, str(error), f"{logs}; {advice}")


def _compared(tier: str, cold: Answer, found: Answer, bound: float, *, apart: bool = False) -> Finding:
    """The verdict on the answer to a prompt whose KV a tier had, or that was computed.

    Args:
        bound: the difference of two computed answers.
        apart: whether prefill handed the KV over to decode.
    """
    subject, name = ("prefill/decode", f"{tier}, handed over") if apart else ("server", tier)
    text = f"{name}: {1000 * found.seconds:.0f} ms to the first token, computed {1000 * cold.seconds:.0f}"
    if found.tier != tier:
        advice = "The answer says nothing of this tier; see the server's log and `sglang-ext doctor`"
        return Finding(Level.WARNING, subject, f"{text}; the prompt came from {found.tier} instead", advice)
    if math.isinf(bound):
        text += "; not compared, because two computed answers have other tokens than each other"
        return Finding(Level.WARNING, subject, text, _UNEQUAL)
    difference, allowed = cold.difference(found), max(bound, FLOOR)
    far = "other tokens" if math.isinf(difference) else f"log probabilities {difference:.1e} apart"
    within = f"{far}; allowed {allowed:.1e}, two computed answers {bound:.1e}"
    if difference > allowed:
        how = "prefill and decode apart" if apart else "--kv-dram-size"
        advice = f"Do not serve with {how} on this machine, and report this with the output of --json"
        return Finding(Level.PROBLEM, subject, f"{text}; ANOTHER ANSWER than when computed: {within}", advice)
    return Finding(Level.OK, subject, f"{text}; the same answer: {within}")


_UNEQUAL = (
    "Check whether the server's attention backend is deterministic; `tests/gpu` compares the bytes of KV"
)
