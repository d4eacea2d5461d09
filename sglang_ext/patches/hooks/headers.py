"""Take a router's headers: tenants' salts, and places of prompts where a state is worth keeping.

Change: hooks at four places.

- before ``TokenizerManager.generate_request``: SGLang takes ``cache_salt`` in no field of requests to embed,
  score and rerank, and such places in no field at all, so the router sends them as headers
  (``keys.SALT_HEADER``, ``keys.KEEP_HEADER``). They are kept for the task that serves the request;
- after ``_create_tokenized_object``: they go into the message to the scheduler: in ``custom_params`` of its
  sampling parameters, where it has no field for them. A client's own values under these names are removed,
  with the headers and without;
- before ``_add_request_to_queue``: the scheduler's request gets them before its prefix is looked up;
- after ``OpenAIServingEmbedding._build_embedding_response``, which names the model by its path on the
  server's disk, also with ``--served-model-name``. All other answers have the served name, or the client's
  ``model``.

Why no extension point serves: bodies are read into classes without such a field; the path is in the middle of
a function.

For: any device.
Can go: when SGLang takes ``cache_salt`` in these requests and the places in any, and answers embeddings with
the served name.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any, Final

from sglang_ext.keys import KEEP_HEADER, MOST_KEPT, SALT_HEADER
from sglang_ext.patches.adapter.hybrid.chunks import KEPT_PLACES
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

SALT: Final = "sglang_ext_cache_salt"
"""Of ``custom_params``: the salt of a request to embed, on its way to the scheduler."""
KEEP: Final = "sglang_ext_keep"
"""Of ``custom_params``: the places of a prompt on their way to the scheduler."""
_PLACES: Final = re.compile(rf"\d{{1,9}}(?:,\d{{1,9}}){{0,{MOST_KEPT - 1}}}")
_sent: ContextVar[tuple[str | None, list[int]]] = ContextVar("sent", default=(None, []))
"""(Salt, places) of the request that this task serves. Prompts of a batch are tokenized by the same task."""
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def before_request(_manager: Any, obj: Any, request: Any = None) -> None:
    """Before ``generate_request``. request: as it came by HTTP; None for the server's own."""
    headers = getattr(request, "headers", None)
    if headers is None:
        _sent.set((None, []))
        return
    places = headers.get(KEEP_HEADER) or ""
    kept = [int(place) for place in places.split(",")] if _PLACES.fullmatch(places) else []
    _sent.set((headers.get(SALT_HEADER) or None, kept))


def after_tokenized(message: Any, _manager: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After ``_create_tokenized_object``."""
    (salt, places), params = _sent.get(), message.sampling_params
    generates = hasattr(message, "cache_salt")
    if generates and salt is not None:
        message.cache_salt = salt
    given = params.custom_params
    if isinstance(given, dict) and not given.keys().isdisjoint((SALT, KEEP)):
        given = {name: value for name, value in given.items() if name not in (SALT, KEEP)}
        params.custom_params = given
    added: dict[str, Any] = {}
    if not generates and salt is not None:
        added[SALT] = salt
    if generates and places:
        added[KEEP] = places
    if added:
        params.custom_params = {**(given if isinstance(given, dict) else {}), **added}
    return message


def before_queue(_scheduler: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``_add_request_to_queue``."""
    given = req.sampling_params.custom_params
    if not isinstance(given, dict):
        return
    if SALT in given:
        req.cache_salt = given[SALT]
    if KEEP in given:
        setattr(req, KEPT_PLACES, tuple(given[KEEP]))
        rest = {name: value for name, value in given.items() if name != KEEP}
        req.sampling_params.custom_params = rest or None


def after_build(response: Any, serving: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After ``_build_embedding_response``."""
    response.model = serving.tokenizer_manager.served_model_name
    return response


PATCH = hook_patch(
    "headers",
    "tenants' embeddings and scores share no KV, states are kept where routers say that prompts begin alike, "
    "and embeddings are answered with the model's served name",
    Hook(f"{_MANAGER}.generate_request", "before", before_request),
    Hook(f"{_MANAGER}._create_tokenized_object", "after", after_tokenized),
    Hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", "before", before_queue),
    Hook(
        "sglang.srt.entrypoints.openai.serving_embedding.OpenAIServingEmbedding._build_embedding_response",
        "after",
        after_build,
    ),
)
