"""Calls of the router to a worker besides generation: its facts, its liveness, its tokens of a text.

Facts read from SGLang (``entrypoints/http_server.py``): ``/model_info`` is answered by the HTTP process at
once; ``/server_info`` waits for the scheduler; neither reports the size of the vocabulary. That is learnt
from a request that asks for the logprob of token -1, which SGLang refuses before the scheduler sees it,
naming the valid range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from sglang_ext.cost_model import Batching
from sglang_ext.errors import PeerError
from sglang_ext.geometry import BIDIRECTIONAL
from sglang_ext.protocol.cluster import dp_rank_of, server_of
from sglang_ext.router.api.limits import ModelKind
from sglang_ext.router.api.validation import Json
from sglang_ext.router.fleet.facts import ChatFacts, EventSource, InstanceFacts, ModelFacts
from sglang_ext.router.http.types import JSON_TYPE, Upstream

_VOCABULARY = re.compile(r"valid range is \[0, (\d+)\)")
_VOCABULARY_PROBE = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1},
    "return_logprob": True,
    "token_ids_logprob": [-1],
}
LEARN_TIMEOUT_S = 10.0
"""``/server_info`` waits until the scheduler has finished its present batch."""
TELLS_FLAG = "--kv-router"

_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})
"""Hosts at which SGLang's publisher listens; with any other it connects to who listens there."""
_REPLAY = re.compile(r"tcp://(\*|[\w.-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")

_TOOLS_AS_GIVEN = (0, 5, 23)
_SYSTEM_IN_PLACE = (0, 5, 22)
"""From these versions of SGLang on, see ``ChatFacts``."""

_ROLES = {"null": "colocated", None: "colocated"}


class NotUsable(PeerError):
    """The worker answers, but lacks a needed fact, or asks for a key."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; ``None`` when it is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to a probe."""

    weight_version: str
    model_path: str


class WorkerApi:
    """Calls to workers.

    Args:
        upstream: how they are reached.
        api_key: sent with every call; the workers' ``--api-key``.
    """

    def __init__(self, upstream: Upstream, api_key: str | None = None) -> None:
        self._upstream = upstream
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def call(
        self, url: str, method: str, target: str, *, body: Json | bytes | None = None, timeout_s: float
    ) -> Answer:
        """One call, read to its end.

        Args:
            body: JSON, as an object or as bytes.

        Raises:
            PeerError, DeadlineError: as ``Upstream.open`` and ``UpstreamResponse.read``.
        """
        headers = dict(self._headers)
        data = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        if data:
            headers["content-type"] = JSON_TYPE
        response = await self._upstream.open(
            method,
            server_of(url) + target,
            headers=headers,
            body=data,
            timeout_s=timeout_s,
        )
        try:
            return Answer(response.status, response.headers, await response.read())
        finally:
            response.close()

    async def probe(self, url: str, timeout_s: float) -> Pulse:
        """Whether the worker lives, and with which weights; costs it no computing."""
        info = await self._object(url, "/model_info", timeout_s)
        return Pulse(str(info.get("weight_version")), str(info.get("model_path")))

    async def learn(self, url: str, timeout_s: float = LEARN_TIMEOUT_S) -> InstanceFacts:
        """The facts of a worker.

        Raises:
            ConnectFailed: no process listens there.
            NotUsable: it answers, but one of the facts cannot be had; the text says which.
            PeerError, DeadlineError: it cannot be reached now.
        """
        model = await self._object(url, "/model_info", timeout_s)
        server = await self._object(url, "/server_info", timeout_s)
        models = await self._object(url, "/v1/models", timeout_s)
        try:
            context_length = int(models["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise NotUsable(f"{url}/v1/models does not tell max_model_len") from None
        generates = bool(model.get("is_generation", True))
        architectures = model.get("architectures") or [model.get("model_type")]
        return InstanceFacts(
            model=ModelFacts(
                # As it was started: SGLang names a server after the path of an update of its weights.
                name=str(
                    server.get("served_model_name")
                    or model.get("served_model_name")
                    or model.get("model_path")
                ),
                architecture=str(architectures[0]),
                vocab_size=await self._vocab_size(url, timeout_s),
                context_length=context_length,
                kind=ModelKind.GENERATES if generates else ModelKind.POOLS,
            ),
            weight_version=str(model.get("weight_version")),
            identity=_identity(server),
            role=_ROLES.get(model.get("disaggregation_mode"), str(model.get("disaggregation_mode"))),
            tokenizer_path=str(model.get("tokenizer_path") or model.get("model_path")),
            truncates=bool(server.get("allow_auto_truncate")),
            bootstrap_port=_port(server.get("disaggregation_bootstrap_port")),
            reports=_reports(server.get("launch_command")),
            events=_events(url, server),
            changes_role=bool(server.get("enable_pd_role_switch")),
            chat=_chat_facts(model, server),
            batching=_batching(server),
            obstacle=_obstacle(model, server, str(architectures[0])) or _replica_obstacle(url, model, server),
        )

    async def _object(self, url: str, target: str, timeout_s: float) -> Json:
        answer = await self.call(url, "GET", target, timeout_s=timeout_s)
        if answer.status in (401, 403):
            raise NotUsable(f"{url} asks for a key; give --worker-api-key")
        value = answer.json()
        if answer.status != 200 or not isinstance(value, dict):
            raise NotUsable(f"{url}{target} answered {answer.status}; is it an SGLang server that is ready?")
        return value

    async def _vocab_size(self, url: str, timeout_s: float) -> int:
        answer = await self.call(url, "POST", "/generate", body=_VOCABULARY_PROBE, timeout_s=timeout_s)
        found = _VOCABULARY.search(answer.body.decode("utf-8", "replace"))
        if answer.status != 400 or found is None:
            raise NotUsable(
                f"{url} does not tell the size of its vocabulary, and prompts could not be checked; "
                "is it a version of SGLang that is supported?"
            )
        return int(found[1])

    async def tokenize(self, url: str, body: Json, timeout_s: float) -> list[int] | None:
        """The worker's own tokens of a prompt or a conversation; ``None`` when it has no such endpoint.

        Raises:
            NotUsable: it refuses this one.
            PeerError, DeadlineError: it cannot be reached.
        """
        answer = await self.call(url, "POST", "/v1/tokenize", body=body, timeout_s=timeout_s)
        if answer.status in (404, 405):
            return None
        value = answer.json()
        tokens = value.get("tokens") if isinstance(value, dict) else None
        if answer.status != 200 or not isinstance(tokens, list):
            raise NotUsable(f"{url}/v1/tokenize answered {answer.status}")
        return tokens


def _obstacle(model: Json, server: Json, architecture: str) -> str:
    """Why ordinary prompts would end a server; empty where they do not."""
    described = model.get("embedding")
    both_ways = isinstance(described, dict) and described.get("attention") == "bidirectional"
    if not (both_ways or architecture in BIDIRECTIONAL) or server.get("disable_radix_cache"):
        return ""
    return (
        "its model has bidirectional attention, with which SGLang's radix cache ends the server at the "
        "second prompt with the same beginning; start it with --disable-radix-cache"
    )


def _replica_obstacle(url: str, model: Json, server: Json) -> str:
    """Why requests would not come to the replica that a URL names; empty where they do."""
    rank, replicas = dp_rank_of(url), _replicas(server)
    if rank is None:
        if replicas > 1 and _reports(server.get("launch_command")):
            return "its replicas register, each as an instance of its own; leave it out of --worker-urls"
        apart = server.get("disaggregation_mode"), server.get("disaggregation_transfer_backend")
        if replicas > 1 and apart == ("prefill", "global"):
            return "decode would not know which of its replicas has a prompt; start it with --kv-router"
        return ""
    if rank >= replicas:
        return f"its server has no replica {rank} any more"
    if not model.get("is_generation", True):
        return "SGLang takes no replica's rank with prompts to embed; start it without --dp-size"
    return ""


def _replicas(server: Json) -> int:
    """How many replicas a server has; with DP attention, SGLang counts them as another size."""
    sizes = [server.get(name) for name in ("dp_size", "attn_dp_size")]
    return max([size for size in sizes if isinstance(size, int)], default=1)


def _port(value: object) -> int | None:
    return value if isinstance(value, int) and 0 < value < 65536 else None


def _batching(server: Json) -> Batching:
    def tokens(name: str) -> int:
        value = server.get(name)
        return value if isinstance(value, int) and value > 0 else 0

    return Batching(
        tokens("chunked_prefill_size"), tokens("max_prefill_tokens"), bool(server.get("enable_mixed_chunk"))
    )


def _reports(launch_command: object) -> bool:
    """Whether a server's command line names a router to register with."""
    words = launch_command.split() if isinstance(launch_command, str) else []
    return any(word.partition("=")[0] == TELLS_FLAG for word in words)


def _events(url: str, server: Json) -> EventSource | None:
    """Where a server publishes its KV events; ``None`` where it does not, or where they are no use: to a
    socket that connects to one named host, or from several caches behind one address."""
    reported = server.get("kv_events")
    if not isinstance(reported, dict) or reported.get("publisher") != "zmq" or reported.get("dp_size") != 1:
        return None
    port = _port(reported.get("endpoint_port_base"))
    if port is None or str(reported.get("endpoint_host")).strip("[]") not in _WILDCARDS:
        return None
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    try:
        replay = str(orjson.loads(server["kv_events_config"])["replay_endpoint"])
        again = _REPLAY.fullmatch(replay)
    except (KeyError, TypeError, orjson.JSONDecodeError):
        again = None
    if again is not None:
        there = host if again[1].strip("[]") in _WILDCARDS else again[1]
        replay = f"tcp://{there}:{again[2]}"
    return EventSource(
        f"tcp://{host}:{port}", replay if again is not None else None, str(reported.get("topic") or "")
    )


def _identity(server: Json) -> str:
    """Differs between two starts: SGLang draws a seed and measures how long its start took."""
    facts = {
        name: server.get(name) for name in ("startup_time", "random_seed", "nccl_port", "launch_command")
    }
    return orjson.dumps(facts, option=orjson.OPT_SORT_KEYS, default=str).decode()


def _chat_facts(model: Json, server: Json) -> ChatFacts:
    defaults = server.get("default_chat_template_kwargs")
    return ChatFacts(
        chat_template=server.get("chat_template"),
        completion_template=server.get("completion_template"),
        hf_chat_template_name=server.get("hf_chat_template_name"),
        reasoning_parser=model.get("reasoning_parser"),
        tool_call_parser=model.get("tool_call_parser"),
        default_template_kwargs=tuple(defaults.items()) if isinstance(defaults, dict) else (),
        multimodal=bool(model.get("has_image_understanding") or model.get("has_audio_understanding")),
        tools_as_given=_version(server) >= _TOOLS_AS_GIVEN,
        system_in_place=_version(server) >= _SYSTEM_IN_PLACE,
    )


def _version(server: Json) -> tuple[int, ...]:
    """Of SGLang; empty where it reports none."""
    return tuple(map(int, re.findall(r"\d+", str(server.get("version") or ""))[:3]))
