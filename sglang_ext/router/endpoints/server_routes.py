"""Every route of SGLang's server, and its treatment at the router.

A test reads the routes from SGLang's source (``scripts/following/server_routes.py``), and fails for a route
without a row in this table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


class How(enum.StrEnum):
    """The treatment of a request to one of SGLang's routes."""

    PREFIX = "by prefix"
    """As every prompt: to the worker that holds most of it, with limits, waiting and ``/explain``."""
    ANY = "any worker"
    """To the least busy worker."""
    SESSION = "the session's worker"
    """To the worker that keeps the session or response that the request names."""
    EVERY = "every worker, for administrators"
    """To every worker that can be reached. The answer has each worker's own."""
    ALL_OR_NONE = "every worker, all or none, for administrators"
    """To every member of the fleet, and to none while one of them cannot be reached. Where a worker fails,
    the others are set back if that is possible; the answer names each."""
    HERE = "answered here"
    """By the router."""
    REFUSED = "refused"
    """HTTP 404; the message has the reason and the alternative."""


@dataclass(frozen=True, slots=True)
class ServerRoute:
    """One route, as SGLang writes its path."""

    path: str
    how: How
    note: str
    """Its effect; of a refused route, the reason and the alternative."""
    method: str = "POST"
    """The method with which the router takes a route that it passes on. A change of state takes no GET: a
    link or an image of a web page could send that.
    """
    admin: bool = False
    """Of ``How.ANY``: for administrators."""
    prompts: bool = False
    """Of ``How.ANY``: the body has a prompt, which SGLang caches under no tenant's name."""
    undo: str = ""
    """Of ``How.ALL_OR_NONE``: the route that sets a worker back."""
    weights: bool = False
    """Cached KV may be of other weights afterwards, also where it has failed."""


_DIRECTLY: Final = "ask the server itself; GET /cluster has the addresses"


def _rows(how: How, note: str, paths: str, **more: bool | str) -> Iterator[ServerRoute]:
    for path in paths.split():
        yield ServerRoute(path, how, note, **more)  # type: ignore[arg-type]


_TABLE: Final = (
    *_rows(
        How.PREFIX,
        "generation",
        "/generate /vertex_generate /v1/chat/completions /invocations /v1/completions /v1/responses "
        "/v1/messages /api/chat /api/generate",
    ),
    *_rows(
        How.PREFIX,
        "embeddings and classes, of a model that embeds or classifies",
        "/v1/embeddings /encode /v1/classify /classify",
    ),
    *_rows(How.PREFIX, "scores of items, and documents in the order of theirs", "/v1/score /v1/rerank"),
    *_rows(How.ANY, "tokens of a text or a conversation", "/tokenize /v1/tokenize /v1/messages/count_tokens"),
    *_rows(How.ANY, "text of tokens", "/detokenize /v1/detokenize"),
    *_rows(
        How.ANY,
        "facts of the model",
        "/v1/models /v1/models/{model:path} /model_info /get_model_info",
        method="GET",
    ),
    *_rows(How.ANY, "Ollama's list of models", "/api/tags", method="GET"),
    *_rows(How.ANY, "Ollama's facts of a model", "/api/show"),
    *_rows(How.ANY, "the calls in a text that a model wrote", "/parse_function_call"),
    *_rows(How.ANY, "a text that a model wrote, parted into reasoning and answer", "/separate_reasoning"),
    *_rows(
        How.ANY,
        "answers to questions about an input, scored without generation",
        "/v1/decisions /v1/systemone",
        prompts=True,
    ),
    *_rows(How.ANY, "a weight by its name, for administrators", "/get_weights_by_name", admin=True),
    *_rows(
        How.SESSION,
        "a response that is kept",
        "/v1/responses/{response_id} /v1/responses/{response_id}/cancel",
    ),
    *_rows(
        How.SESSION,
        "a session, which is opened at the worker with the fewest requests. Requests that name it in "
        "session_params go there, and it is lost with the worker",
        "/open_session /close_session",
    ),
    *_rows(How.EVERY, "forgets cached KV, where no request runs", "/flush_cache"),
    *_rows(How.EVERY, "profiles", "/start_profile /stop_profile"),
    *_rows(How.EVERY, "load of each worker", "/v1/loads", method="GET"),
    *_rows(
        How.EVERY,
        "logs, traces and settings of the process",
        "/configure_logging /set_trace_level /freeze_gc /set_internal_state /slow_down",
    ),
    *_rows(
        How.EVERY,
        "how often each expert was used",
        "/start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record",
    ),
    *_rows(How.EVERY, "compares, sums or resets weights", "/weights_checker", weights=True),
    *_rows(How.EVERY, "texts for n-gram speculation", "/list_external_corpora", method="GET"),
    *_rows(How.ALL_OR_NONE, "texts for n-gram speculation", "/add_external_corpus /remove_external_corpus"),
    *_rows(
        How.ALL_OR_NONE,
        "loads a LoRA adapter; where a worker fails, the others unload it again",
        "/load_lora_adapter /load_lora_adapter_from_tensors",
        undo="/unload_lora_adapter",
    ),
    *_rows(How.ALL_OR_NONE, "unloads a LoRA adapter", "/unload_lora_adapter"),
    *_rows(
        How.ALL_OR_NONE,
        "changes weights. A worker that fails keeps the former ones or parts of both: repeat it, or drain it",
        "/update_weights_from_disk /update_weights_from_distributed /update_weights_from_tensor "
        "/update_weights_from_ipc /begin_weight_update /end_weight_update /update_weight_version",
        weights=True,
    ),
    *_rows(How.ALL_OR_NONE, "leaves the group through which weights come", "/destroy_weights_update_group"),
    *_rows(
        How.ALL_OR_NONE,
        "stops generating; where a worker fails, the others go on again",
        "/pause_generation",
        undo="/continue_generation",
    ),
    *_rows(How.ALL_OR_NONE, "goes on generating", "/continue_generation"),
    *_rows(
        How.ALL_OR_NONE,
        "gives the GPU's memory back, and takes it again",
        "/release_memory_occupation /resume_memory_occupation",
        weights=True,
    ),
    *_rows(
        How.HERE,
        "health, facts and metrics of the cluster",
        "/health /health_generate /ready /ping /metrics /server_info /get_server_info /openapi.json",
        method="GET",
    ),
    *_rows(
        How.HERE, "sends browsers to the chat under /ui; programs read that SGLang runs", "/", method="GET"
    ),
    *_rows(How.HERE, "ends a request by its name", "/abort_request"),
    *_rows(
        How.REFUSED,
        "the router reads no forms and passes none on. For speech, " + _DIRECTLY,
        "/v1/audio/transcriptions",
    ),
    *_rows(
        How.REFUSED,
        "the router passes no WebSocket on. Stream /v1/chat/completions, or " + _DIRECTLY,
        "/v1/realtime",
    ),
    *_rows(
        How.REFUSED,
        "the router offers no pages of documentation. GET /openapi.json has the description",
        "/docs /docs/oauth2-redirect /redoc",
    ),
    *_rows(
        How.REFUSED,
        "servers with this extension have no HiCache. POST /flush_cache empties HBM and DRAM; --kv-dram-size "
        "and --kv-disk-path set the tiers",
        "/hicache/storage-backend /hicache/storage-backend/clear /get_hicache_l3_cache_layout",
    ),
    *_rows(
        How.REFUSED,
        "each server has a rank of its own in the group, so that no body fits all. Set the group up at "
        "each server (GET /cluster has the addresses); weights can then be updated here",
        "/init_weights_update_group /init_weights_send_group_for_remote_instance "
        "/send_weights_to_remote_instance /get_remote_instance_transfer_engine_info "
        "/remote_instance_transfer_engine_info",
    ),
    *_rows(
        How.REFUSED,
        "the router has to know the role of each server. POST /cluster/instances/{instance}/role changes it",
        "/pd_role_switch",
    ),
    *_rows(
        How.REFUSED,
        "it changes or shows the ranks of one server. To change them, " + _DIRECTLY,
        "/scale_elastic_ep /is_scaling_elastic_ep",
    ),
    *_rows(How.REFUSED, "it debugs one server. To use it, " + _DIRECTLY, "/dumper/{method}"),
)

ROWS: Final = {row.path: row for row in _TABLE}
"""By path."""
if len(ROWS) != len(_TABLE):
    raise ValueError("a route has two rows")


def route_of(path: str) -> str:
    """A path with parameters as a router's route: its part before the first parameter."""
    return path.partition("{")[0]


def table() -> list[str]:
    """The table as Markdown, a line for each kind of answer and note, as docs/router.md has it."""
    lines: dict[tuple[How, str], list[str]] = {}
    for row in _TABLE:
        lines.setdefault((row.how, row.note), []).append(f"`{row.path}`")
    return [f"| {', '.join(paths)} | {how} | {note} |" for (how, note), paths in lines.items()]
