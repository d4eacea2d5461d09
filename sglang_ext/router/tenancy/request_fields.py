"""Every field that a supported version of SGLang takes in a request, and who may set it.

``tests/engine/cache/test_request_fields.py`` holds the tables to SGLang's classes: a field of a newer version
fails there until a table has it. Until then it reaches no server. SGLang ignores top-level fields that it
does not know, and client libraries rely on that, so the router leaves them out of the body. Unknown sampling
parameters, which SGLang refuses, and unknown fields of an image are refused. ``--trusted-fields`` lets a
field through.

Prompts are cached under their tokens and the request's namespace, media under a hash. A client that chooses
such a hash, or the adapter's id that goes into the namespace, puts its own KV where another client's is
looked up. Other fields are SGLang's notes to itself, which it takes from a body because the same class
carries them between its processes.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from sglang_ext.keys import SALT_HEADER
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.documents import DOCUMENT_IDS
from sglang_ext.router.api.validation import Json


class Who(enum.Enum):
    """The parties that may set a field."""

    CLIENT = enum.auto()
    """Any client: the field concerns its request alone, or is checked elsewhere."""
    SCOPED = enum.auto()
    """Any client; a tenant's value gets a prefix of the tenant's own."""
    ROUTER = enum.auto()
    """The router, for tenants. Without tenants there are no parties to keep apart, and clients may set it."""
    TRUSTED = enum.auto()
    """Clients without a tenant, where the operator vouches for them (``--trusted-fields``). So with every
    field that is in no table."""
    NOBODY = enum.auto()
    """No client: SGLang writes it itself."""


def _all(who: Who, names: str) -> dict[str, Who]:
    return dict.fromkeys(names.split(), who)


FIELDS: Final[Mapping[str, Who]] = {
    # -- the prompt ----------------------------------------------------------------------------------
    **_all(Who.CLIENT, "text input_ids input_embeds messages input query model reasoning sampling_params"),
    **_all(Who.CLIENT, "image_data video_data audio_data modalities"),
    # The server fetches media, and hashes the bytes that it received.
    **_all(Who.CLIENT, "use_audio_in_video video_config images_config max_dynamic_patch min_dynamic_patch"),
    **_all(Who.CLIENT, "mm_processor_kwargs thinking"),
    **_all(Who.CLIENT, "tools tool_choice parallel_tool_calls chat_template_kwargs"),
    # -- sampling ------------------------------------------------------------------------------------
    **_all(Who.CLIENT, "temperature top_p top_k min_p n seed stop stop_token_ids stop_regex no_stop_trim"),
    **_all(Who.CLIENT, "frequency_penalty presence_penalty repetition_penalty logit_bias max_tokens"),
    **_all(Who.CLIENT, "min_tokens ignore_eos skip_special_tokens regex ebnf response_format custom_params"),
    **_all(Who.CLIENT, "watermark"),
    # -- the answer ----------------------------------------------------------------------------------
    **_all(Who.CLIENT, "stream stream_options metadata user logprobs top_logprobs sampling_logprobs_mode"),
    **_all(Who.CLIENT, "return_hidden_states return_routed_experts routed_experts_start_len"),
    **_all(Who.CLIENT, "return_prompt_token_ids return_token_ids return_sampling_mask"),
    **_all(Who.CLIENT, "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64"),
    **_all(Who.CLIENT, "return_cached_tokens_details return_spec_tokens_details"),
    **_all(Who.CLIENT, "dimensions return_pooled_hidden_states embed_override_token_id"),
    # "background" is metered by the API that has it, and refused by the other one whose server takes it.
    **_all(Who.CLIENT, "background"),
    # -- whose it is ---------------------------------------------------------------------------------
    # A part of the namespace beside the salt: whatever a tenant chooses stays within its own.
    **_all(Who.CLIENT, "extra_key lora_path"),
    **_all(Who.CLIENT, "priority"),  # up to the key's
    **_all(Who.SCOPED, "rid session_id"),
    **_all(Who.CLIENT, "session_params"),  # its names get a tenant's prefix: ``admit.additions``
    **_all(Who.ROUTER, "cache_salt request_id conversation_id"),
    # -- where it runs, and before whom ----------------------------------------------------------------
    **_all(Who.ROUTER, "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size"),
    **_all(Who.ROUTER, "routed_dp_rank data_parallel_rank disagg_prefill_dp_rank routing_key"),
    # -- metrics, which name tenants -------------------------------------------------------------------
    **_all(Who.ROUTER, "custom_labels log_metrics"),
    # -- code of the client's, which runs in the scheduler and sees every request ------------------------
    **_all(Who.ROUTER, "custom_logit_processor"),
    # -- names of content that a server takes on trust -----------------------------------------------------
    **_all(Who.TRUSTED, "mm_hashes mm_content_hashes"),
    # SGLang's hints to its storage, other than ours, are "set by a trusted orchestrator, never by a client".
    **_all(Who.TRUSTED, "kv_hints"),
    # -- vectors in the place of tokens' embeddings: one of another size than the model's ends the server --
    **_all(Who.TRUSTED, "embed_overrides query_embed_overrides item_embed_overrides"),
    # -- SGLang's own notes ------------------------------------------------------------------------------
    **_all(Who.NOBODY, "lora_id http_worker_ipc external_trace_header received_time return_bytes"),
    **_all(Who.NOBODY, "need_wait_for_mm_inputs num_items_assigned encoder_urls positional_embed_overrides"),
    **_all(Who.NOBODY, "multi_item_delimiter_indices token_indices_to_pool decision_layout"),
}
"""Top-level fields of bodies. A name means the same in every HTTP API. Fields of only one API, which clients
may set there, stand with it (``Dialect.own_fields``).
"""

SAMPLING: Final[Mapping[str, Who]] = {
    **_all(
        Who.CLIENT, "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p n beam_width"
    ),
    **_all(
        Who.CLIENT, "frequency_penalty presence_penalty repetition_penalty min_new_tokens json_schema regex"
    ),
    **_all(Who.CLIENT, "ebnf structural_tag ignore_eos skip_special_tokens spaces_between_special_tokens"),
    **_all(Who.CLIENT, "no_stop_trim stream_interval logit_bias sampling_seed custom_params watermark"),
    # Set when the others have been checked; a client that set them would bypass the checks.
    **_all(Who.NOBODY, "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized"),
    **_all(Who.NOBODY, "ebnf_full_assistant"),
}
"""Fields of ``sampling_params``."""

MEDIA: Final[Mapping[str, Who]] = {
    **_all(Who.CLIENT, "url detail max_dynamic_patch min_dynamic_patch fps max_frames max_tokens_per_frame"),
    **_all(Who.CLIENT, "max_image_tokens max_long_side_pixel data format preprocess_kwargs"),
    **_all(Who.TRUSTED, "content_hash"),
}
"""Fields of the object of an image, a video or a sound, in a part of a message or in ``image_data``."""

MEDIA_KEYS: Final = ("image_url", "video_url", "audio_url", "input_audio")
"""Fields of a message's part that hold such an object."""

_GUARDED = frozenset(name for name, who in FIELDS.items() if who not in (Who.CLIENT, Who.SCOPED))
_SAMPLED = frozenset(name for name, who in SAMPLING.items() if who is Who.CLIENT)
_SHOWN = frozenset(name for name, who in MEDIA.items() if who is Who.CLIENT)
_PLAIN_SAMPLING = _SAMPLED - {"custom_params"}
_PLAIN_MESSAGE = {"role", "content"}
HINTS: Final = "kv_hints"
_TELLING = frozenset(name for name, who in FIELDS.items() if who is not Who.CLIENT) | {
    "custom_params",
    "extra_key",
}
ADAPTER_ID: Final = re.compile(r"[0-9a-f]{12}5[0-9a-f]{3}[89ab][0-9a-f]{15}\Z")
"""SGLang's id of an adapter of ``--lora-paths``: a UUID of version 5, of its name and path. SGLang appends it
to the ``extra_key``, so that a key with this end is the namespace of the adapter's KV. Ids of adapters that
were loaded later are random.
"""

STEERING_HEADERS = frozenset({
    "x-override-rid", "x-override-bootstrap-host", "x-override-bootstrap-port", "x-override-bootstrap-room",
    "x-override-conversation-id", "x-override-routed-dp-rank", "x-override-disagg-prefill-dp-rank",
    "x-override-priority", "x-data-parallel-rank", "x-body-compressed", SALT_HEADER,
})  # fmt: skip
"""Headers that override the fields of the same names in SGLang, or that change how it reads the body: they
would defeat the fields that the router has checked or set. So would a salt that the client chooses.
"""
PASSED_HEADERS = frozenset({
    "accept", "accept-language", "anthropic-beta", "anthropic-version", "authorization", "baggage",
    "content-type", "openai-beta", "traceparent", "tracestate", "user-agent", "x-api-key",
    "x-sglext-ids-framed", "x-sglext-return-input-ids", "x-sglext-return-output-ids",
})  # fmt: skip
"""Headers of clients that are passed on to servers. All others are left out: cookies are the router's, and a
new header of SGLang needs a review of its effects first.
"""
OPERATOR_HEADERS = frozenset({"x-custom-labels", "x-smg-routing-key"})
"""Names that SGLang schedules and counts by, shared by all who use a server: passed on for clients without a
tenant only."""


def forbidden(
    payload: Json, dialect: Dialect | None, *, tenant: bool, trusted: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """(field, reason) of each field that the client has set and must not. ``kv_hints`` the router takes
    itself.

    Args:
        dialect: the HTTP API; None for the body of an advisory request.
        tenant: whether the client is one of several that are kept apart.
        trusted: fields for which the operator vouches.
    """
    vouched: frozenset[str] = frozenset() if tenant else trusted
    for name in payload.keys() & _GUARDED:
        who = FIELDS[name]
        if payload[name] is None or (who is Who.ROUTER and not tenant) or name == HINTS:
            continue
        if who is Who.TRUSTED and name in vouched:
            continue
        yield name, _why(who, name)
    keys = payload.get("extra_key")
    if any(
        isinstance(key, str) and ADAPTER_ID.search(key)
        for key in (keys if isinstance(keys, list) else [keys])
    ):
        yield (
            "extra_key",
            "ends as the id of a LoRA adapter does, whose KV it would stand for; append a letter",
        )
    sampling = payload.get("sampling_params")
    for index, one in enumerate(sampling if isinstance(sampling, list) else (sampling,)):
        if isinstance(one, dict) and not one.keys() <= _SAMPLED:
            where = f"sampling_params[{index}]" if isinstance(sampling, list) else "sampling_params"
            for name in sorted(one.keys() - _SAMPLED - vouched):
                yield f"{where}.{name[:80]}", _why(SAMPLING.get(name), name)
    for where, media in _media(payload, DIALECTS.values() if dialect is None else (dialect,)):
        for name in sorted(media.keys() - _SHOWN - vouched):
            if media[name] is not None:
                yield f"{where}.{name[:80]}", _why(MEDIA.get(name), name)


def plain(payload: Json, dialect: Dialect) -> bool:
    """A quick test, true for nearly all bodies: no field concerns ``forbidden`` or a tenant's scope."""
    if not _TELLING.isdisjoint(payload):
        return False
    sampling = payload.get("sampling_params")
    if sampling is not None and not (type(sampling) is dict and sampling.keys() <= _PLAIN_SAMPLING):
        return False
    for name in dialect.media_in:
        if name in payload:
            return False
    for name in dialect.parts_in:
        messages = payload.get(name)
        if type(messages) is not list:
            return False
        for message in messages:
            if not (
                type(message) is dict and message.keys() == _PLAIN_MESSAGE and type(message["content"]) is str
            ):
                return False
    return True


@functools.cache
def _judged(dialect: Dialect) -> frozenset[str]:
    return frozenset(FIELDS) - {HINTS} | dialect.own_fields


def unjudged(payload: Json, dialect: Dialect, *, tenant: bool, trusted: frozenset[str]) -> list[str]:
    """Top-level fields that must not reach a server, and are left out: they are in no table, or the router
    takes them itself.
    """
    if payload.keys() <= _judged(dialect):
        return []
    vouched: frozenset[str] = frozenset() if tenant else trusted
    return [
        name
        for name in payload
        if (name not in FIELDS or name == HINTS) and name not in dialect.own_fields and name not in vouched
    ]


def may_be_trusted(name: str) -> bool:
    """Whether ``--trusted-fields`` can let a field through."""
    taken = name == DOCUMENT_IDS or any(name in dialect.own_fields for dialect in DIALECTS.values())
    return not taken and all(
        table.get(name, Who.TRUSTED) is Who.TRUSTED for table in (FIELDS, SAMPLING, MEDIA)
    )


def _why(who: Who | None, name: str) -> str:
    if who is None:
        return f"is not known to this router, which lets it through with --trusted-fields {name[:80]}"
    if who is Who.ROUTER:
        return "is set by the router and cannot be chosen"
    if who is Who.NOBODY:
        return "is set by the server and cannot be chosen"
    if name.endswith("embed_overrides"):
        return (
            "ends a server that has a model of another width than its vectors; a router without tenants lets "
            f"it through with --trusted-fields {name}"
        )
    return (
        "names content by a hash that servers take on trust, so that one client could give its own to "
        f"others; a router without tenants lets it through with --trusted-fields {name}"
    )


def _media(payload: Json, dialects: Iterable[Dialect]) -> Iterator[tuple[str, Json]]:
    """(where, object) of every image, video and sound."""
    for dialect in dialects:
        for name in dialect.media_in:
            if payload.get(name) is not None:
                for media in _objects(payload[name]):
                    yield name, media
        for name in dialect.parts_in:
            if isinstance(payload.get(name), list):
                for part in _parts(payload[name]):
                    for key in MEDIA_KEYS:
                        for media in _objects(part.get(key)):
                            yield f"{name}: {key}", media


def _objects(value: Any) -> Iterator[Json]:
    """Objects in arrays of any depth."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            stack += value


def _parts(value: Any) -> Iterator[Json]:
    """Messages, their parts, and the parts of those: results of tools have parts too."""
    stack = [value]
    while stack:
        for one in _objects(stack.pop()):
            yield one
            stack += [one[name] for name in ("content", "output") if isinstance(one.get(name), list | dict)]
