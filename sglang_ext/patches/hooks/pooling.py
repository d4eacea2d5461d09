"""Keep tenants' prompts apart in embeddings, scores and rerankings, and answer with the served name.

Change: hooks at four places.

- before ``TokenizerManager.generate_request``: SGLang takes ``cache_salt`` in no field of these requests, so
  the router sends it as a header (``keys.SALT_HEADER``). It is kept for the task that serves the request;
- after ``_create_tokenized_object``: the salt goes into the message to the scheduler. A message of a request
  to embed has no field for it, and takes it in ``custom_params`` of its sampling parameters. A client's own
  value under that name is removed, with the header and without;
- before ``_add_request_to_queue``: the scheduler's request gets the salt before its prefix is looked up;
- after ``OpenAIServingEmbedding._build_embedding_response``, which names the model by its path on the
  server's disk, also with ``--served-model-name``. All other answers have the served name, or the client's
  ``model``.

Why no extension point serves: bodies are read into classes without such a field; the path is in the middle of
a function.

For: any device.
Can go: when SGLang takes ``cache_salt`` in these requests, and answers embeddings with the served name.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

from sglang_ext.keys import SALT_HEADER
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

SALT: Final = "sglang_ext_cache_salt"
"""Of ``custom_params``: the salt of a request to embed, on its way to the scheduler."""
_salt: ContextVar[str | None] = ContextVar("salt", default=None)
"""Of the request that this task serves. Prompts of a batch are tokenized by the same task."""
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def before_request(_manager: Any, obj: Any, request: Any = None) -> None:
    """Before ``generate_request``. request: as it came by HTTP; None for the server's own."""
    headers = getattr(request, "headers", None)
    _salt.set(None if headers is None else headers.get(SALT_HEADER) or None)


def after_tokenized(message: Any, _manager: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After ``_create_tokenized_object``."""
    salt, params = _salt.get(), message.sampling_params
    generates = hasattr(message, "cache_salt")
    if generates and salt is not None:
        message.cache_salt = salt
    given = params.custom_params
    if isinstance(given, dict) and SALT in given:
        given = {name: value for name, value in given.items() if name != SALT}
        params.custom_params = given
    if not generates and salt is not None:
        params.custom_params = {**(given if isinstance(given, dict) else {}), SALT: salt}
    return message


def before_queue(_scheduler: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``_add_request_to_queue``."""
    given = req.sampling_params.custom_params
    if isinstance(given, dict) and SALT in given:
        req.cache_salt = given[SALT]


def after_build(response: Any, serving: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After ``_build_embedding_response``."""
    response.model = serving.tokenizer_manager.served_model_name
    return response


PATCH = hook_patch(
    "pooling",
    "tenants' embeddings and scores share no KV, and embeddings are answered with the model's served name",
    Hook(f"{_MANAGER}.generate_request", "before", before_request),
    Hook(f"{_MANAGER}._create_tokenized_object", "after", after_tokenized),
    Hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", "before", before_queue),
    Hook(
        "sglang.srt.entrypoints.openai.serving_embedding.OpenAIServingEmbedding._build_embedding_response",
        "after",
        after_build,
    ),
)
