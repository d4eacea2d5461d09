"""HTTP client of the measured instance: its identity, times to first token, profiler traces."""

from __future__ import annotations

import http.client
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from sglang_ext.cost_model.fitting import Timed
from sglang_ext.errors import ConfigError, DeadlineError, PeerError

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Facts:
    """Configuration of an instance, as reported by ``/server_info``."""

    model: str
    model_path: str
    device: str
    dtype: str
    tp: int
    pp: int
    capacity: int
    """Tokens of its KV pool."""
    chunk: int | None
    """New tokens that it computes in one piece; None for any number."""
    caches: bool
    """Whether it keeps prefixes at all."""
    running: int | None = None
    """Requests that it generates for at a time, at most; None where it does not report it."""


DELAYED: Final = 4
"""Gaps between tokens, behind the longest one and with it, that a pass in between can make longer."""


def delay_in(moments: Sequence[float]) -> float:
    """Seconds that one interruption has added to equal steps.

    Args:
        moments: of the tokens.

    Raises:
        PeerError: there are too few.
    """
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    if len(gaps) < 2 * DELAYED:
        raise PeerError(f"{len(moments)} tokens are too few to see a delay between them")
    usual, longest = statistics.median(gaps), gaps.index(max(gaps))
    near = gaps[max(0, longest - 1) : longest + DELAYED]
    return sum(near) - len(near) * usual


@dataclass(frozen=True)
class Load:
    """Requests of an instance."""

    running: int
    waiting: int

    @property
    def idle(self) -> bool:
        return self.running == self.waiting == 0


class Instance:
    """One SGLang server, asked by one caller.

    Args:
        url: ``http://host:port``.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not of the form http://host:port", field="--url")
        self.host = parts.hostname
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._api_key = api_key
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def close(self) -> None:
        self._connection.close()

    # -- identity and load ------------------------------------------------------------------------

    def facts(self) -> Facts:
        """The configuration that the instance reports.

        Raises:
            PeerError: it is no SGLang server.
        """
        info = self._json("GET", "/server_info")
        try:
            chunk = info.get("chunked_prefill_size")
            state = (info.get("internal_states") or [{}])[0]
            running = state.get("effective_max_running_requests_per_dp")
            return Facts(
                model=str(info["served_model_name"]),
                model_path=str(info["model_path"]),
                device=str(info.get("device") or "unknown"),
                dtype=str(info.get("dtype") or "auto"),
                tp=int(info.get("tp_size") or 1),
                pp=int(info.get("pp_size") or 1),
                capacity=int(info["max_total_num_tokens"]),
                chunk=int(chunk) if isinstance(chunk, int) and chunk > 0 else None,
                caches=not info.get("disable_radix_cache"),
                running=int(running) if isinstance(running, int) and running > 0 else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PeerError(f"{self.url} is no SGLang server that can be measured: {error!r}") from error

    def load(self) -> Load:
        """The requests that it has now."""
        loads = self._json("GET", "/v1/loads").get("loads") or []
        return Load(
            sum(int(one.get("num_running_reqs") or 0) for one in loads),
            sum(int(one.get("num_waiting_reqs") or 0) for one in loads),
        )

    # -- measurements -----------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int]) -> Timed:
        """Send a prompt for one token; returns new tokens, cached tokens, and the time to first token."""
        begin = time.perf_counter()
        seconds, meta = 0.0, None
        for event in self._stream(prompt, 1):
            seconds = seconds or time.perf_counter() - begin
            meta = event.get("meta_info")
        if meta is None:
            raise PeerError(f"{self.url} answered a prompt with no token")
        cached = int(meta.get("cached_tokens") or 0)
        return Timed(len(prompt) - cached, cached, seconds)

    def first_tokens(self, prompts: Sequence[Sequence[int]]) -> None:
        """Send prompts at once for one token each; returns when all have it."""
        for _ in self._stream([list(prompt) for prompt in prompts], 1):
            pass

    def last_gap(self, prompt: Sequence[int]) -> float:
        """Seconds between the tokens of an answer of two; infinite if they come together, in one event."""
        first, *others = [time.perf_counter() for _ in self._stream(prompt, 2)]
        return others[-1] - first if others else math.inf

    def decode_step(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds per step when so many requests are generated for side by side."""
        moments = []
        for _ in self._stream([list(prompt) for prompt in prompts], tokens):
            moments.append(time.perf_counter())
        # Each step streams one event per request; the first step waits for the prefill. The last token does
        # not count: a server whose tokens are late (`Decode.late`) has no next step to wait for there.
        events = len(prompts)
        steps = len(moments) // events - 2
        if steps < 1:
            raise PeerError(f"{self.url} did not stream its answer")
        return (moments[-events - 1] - moments[events - 1]) / steps

    def delay(self, prompt: Sequence[int], answer: int, other: Sequence[int]) -> float:
        """Seconds by which another prompt, for one token, delays the steps of an answer.

        Args:
            answer: tokens of the answer to ``prompt``. The other prompt is sent in its middle.
        """
        peer = Instance(self.url, self._api_key)
        moments: list[float] = []
        sent: Future[Timed] | None = None
        try:
            with ThreadPoolExecutor(1) as pool:
                for _ in self._stream(prompt, answer):
                    moments.append(time.perf_counter())
                    if len(moments) == answer // 2:
                        sent = pool.submit(peer.prefill, other)
        finally:
            peer.close()
        if sent is None:
            raise PeerError(f"{self.url} does not stream each token by itself")
        sent.result()
        return delay_in(moments)

    def _stream(self, prompt: Any, tokens: int) -> Any:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        response = self._open("POST", "/generate", body)
        if response.status != 200:
            raise PeerError(f"{self.url}/generate: {response.status}: {response.read(500)!r}")
        for raw in response:
            line = raw.strip()
            if line.startswith(b"data:") and b"[DONE]" not in line:
                event = json.loads(line[5:])
                if "error" in event:
                    raise PeerError(f"{self.url}/generate: {event['error']}")
                yield event

    # -- its profiler -----------------------------------------------------------------------------

    def start_profile(self, folder: str, name: str, *, gpu: bool) -> None:
        """Begin to record operators; ``folder`` is on the instance's machine."""
        self._text(
            "/start_profile",
            {
                "output_dir": folder,
                "profile_id": name,
                "activities": ["CPU", "GPU"] if gpu else ["CPU"],
                "with_stack": False,
                "record_shapes": True,
            },
        )

    def stop_profile(self) -> None:
        """End the record, and wait until it is written."""
        self._text("/stop_profile", {})

    def flush(self) -> None:
        """Forget every cached prefix."""
        self._text("/flush_cache", {})

    # -- HTTP -------------------------------------------------------------------------------------

    def _open(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        for attempt in (0, 1):
            try:
                self._connection.request(method, path, data, self._headers)
                return self._connection.getresponse()
            except TimeoutError as error:
                self._connection.close()
                raise DeadlineError(f"{self.url}{path}: no answer within {TIMEOUT_S:.0f} s") from error
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                # A connection that was kept open may have been closed by the server in the meantime.
                if attempt or isinstance(error, ConnectionRefusedError):
                    raise PeerError(
                        f"cannot reach {self.url}: {error}", hint="Name a running SGLang server with --url"
                    ) from error
        raise AssertionError("unreachable")

    def _text(self, path: str, body: Mapping[str, Any]) -> str:
        response = self._open("POST", path, body)
        text = response.read().decode(errors="replace")
        if response.status != 200:
            raise PeerError(f"{self.url}{path}: {response.status}: {text[:300]}")
        return text

    def _json(self, method: str, path: str) -> dict[str, Any]:
        response = self._open(method, path, None)
        text = response.read()
        if response.status != 200:
            raise PeerError(f"{self.url}{path}: {response.status}: {text[:300]!r}")
        try:
            value = json.loads(text)
        except ValueError as error:
            raise PeerError(f"{self.url}{path} did not answer with JSON") from error
        if not isinstance(value, dict):
            raise PeerError(f"{self.url}{path} did not answer with a JSON object")
        return value
