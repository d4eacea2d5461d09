"""The charge of each endpoint against the limits of the caller's key, taken before the handler runs.

``Service`` takes it. Handlers add tokens later, once they are counted. A test walks the router's own table of
endpoints and fails for an endpoint without a row here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sglang_ext.router.endpoints.routes import Access, Route


class Charge(enum.StrEnum):
    """The limits that one request counts against. The values are the words of docs/router.md."""

    NOTHING = "nothing"
    """Open endpoints, administrators', and those between the parts of a cluster."""
    RATE = "rate"
    """One of the key's ``requests_per_second``. It is answered also while as many requests run as the key may
    have, and while the key is in debt with its tokens: it asks, or it ends something."""
    WORK = "rate, concurrency, no debt of tokens"
    """One of ``requests_per_second`` and, while it runs, one of ``concurrent``. Refused while the key has
    used more tokens than it may."""


@dataclass(frozen=True, slots=True)
class Charged:
    """Endpoints that are charged alike."""

    paths: tuple[str, ...]
    """As the router's table of endpoints has them: a prefix ends with ``/``."""
    charge: Charge
    note: str
    """Further charges, and the reason for the charge."""
    methods: tuple[str, ...] = ()
    """All, if none is named."""


def _row(charge: Charge, note: str, paths: str, methods: str = "") -> Charged:
    return Charged(tuple(paths.split()), charge, note, tuple(methods.split()))


TABLE: Final = (
    _row(
        Charge.WORK,
        "tokens of prompt and answer",
        "/generate /vertex_generate /v1/chat/completions /invocations /v1/completions /v1/responses "
        "/v1/messages /api/chat /api/generate /v1/embeddings /encode /v1/classify /classify /v1/score "
        "/v1/rerank",
    ),
    _row(Charge.WORK, "tokens that the worker reports", "/v1/decisions /v1/systemone"),
    _row(
        Charge.WORK,
        "a worker's time on the text",
        "/tokenize /v1/tokenize /detokenize /v1/detokenize /v1/messages/count_tokens /parse_function_call "
        "/separate_reasoning",
    ),
    _row(Charge.WORK, "each worker generates a token", "/health_generate"),
    _row(Charge.WORK, "a session at a worker; a look into the index", "/open_session /query"),
    _row(Charge.WORK, "a hint: the limits of hints as well", "/v1/advisory"),
    _row(
        Charge.RATE,
        "a hint's state, and taking it back; one of `concurrent` while it waits or streams",
        "/v1/advisory/",
    ),
    _row(Charge.WORK, "a document: the limits of documents as well", "/v1/documents/", "PUT"),
    _row(Charge.RATE, "documents' states, and deleting them", "/v1/documents/", "GET DELETE"),
    _row(Charge.RATE, "documents' states, and deleting them", "/v1/documents"),
    _row(
        Charge.RATE,
        "ends something",
        "/abort_request /close_session",
    ),
    _row(
        Charge.RATE,
        "facts",
        "/v1/models /v1/models/ /model_info /get_model_info /server_info /get_server_info /api/tags "
        "/api/show /explain/ /openapi.json /v1/responses/",
    ),
    _row(
        Charge.RATE,
        "refused with 404",
        "/v1/audio/transcriptions /v1/realtime /docs /docs/oauth2-redirect /redoc /hicache/storage-backend "
        "/hicache/storage-backend/clear /get_hicache_l3_cache_layout /init_weights_update_group "
        "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance "
        "/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info /pd_role_switch "
        "/scale_elastic_ep /is_scaling_elastic_ep /dumper/",
    ),
    _row(
        Charge.NOTHING,
        "open: probes, and files of the page",
        "/ /health /ping /ready /ui /ui/",
    ),
    _row(
        Charge.NOTHING,
        "administrators and members only",
        "/metrics /metrics/last_hour /cluster /cluster/instances /cluster/instances/ /get_weights_by_name "
        "/flush_cache "
        "/start_profile /stop_profile /v1/loads /configure_logging /set_trace_level /freeze_gc "
        "/set_internal_state /slow_down /start_expert_distribution_record /stop_expert_distribution_record "
        "/dump_expert_distribution_record /weights_checker /list_external_corpora /add_external_corpus "
        "/remove_external_corpus /load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter "
        "/update_weights_from_disk /update_weights_from_distributed /update_weights_from_tensor "
        "/update_weights_from_ipc /begin_weight_update /end_weight_update /update_weight_version "
        "/destroy_weights_update_group /pause_generation /continue_generation /release_memory_occupation "
        "/resume_memory_occupation",
    ),
)


def _by_path() -> Mapping[str, Mapping[str, Charge]]:
    found: dict[str, dict[str, Charge]] = {}
    for row in TABLE:
        for path in row.paths:
            methods = found.setdefault(path, {})
            for method in row.methods or ("",):
                if method in methods or "" in methods:
                    raise ValueError(f"{method} {path} has two rows")
                methods[method] = row.charge
    return found


ROWS: Final = _by_path()
"""Path -> method, or "" for every method -> charge."""


def charge_of(route: Route, method: str) -> Charge:
    """The charge of a request. An endpoint without a row is charged in full."""
    if route.access is not Access.CLIENT:
        return Charge.NOTHING
    methods = ROWS.get(route.path)
    if methods is None:
        return Charge.WORK
    return methods.get("") or methods.get(method) or Charge.WORK


def table() -> Iterator[str]:
    """The table as Markdown, as docs/router.md has it."""
    for row in TABLE:
        paths = ", ".join(f"`{path}`" for path in row.paths)
        which = f"{' '.join(row.methods)} {paths}" if row.methods else paths
        yield f"| {which} | {row.charge} | {row.note} |"
