"""SGLang's own ``/generate``: what a body must look like before it is sent to a worker."""

from __future__ import annotations

from typing import Any

from sglang_ext.router.api.validation import (
    Endpoint,
    Job,
    Json,
    Limits,
    PromptInput,
    check_ids,
    check_sampling,
    json_type,
    namespaces,
    take_bool,
    take_choices,
    take_int,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

MEDIA_FIELDS = frozenset({"image_data", "video_data", "audio_data"})
_LOGPROB_FIELDS = frozenset({"top_logprobs_num", "return_logprob", "logprob_start_len"})
_PER_PROMPT = _LOGPROB_FIELDS | {
    "custom_logit_processor",
    "lora_path",
    "return_hidden_states",
    "return_sampling_mask",
    "sampling_logprobs_mode",
}
"""Fields that may be lists with an element for each prompt of a batch."""


def parse_generate(payload: Json, limits: Limits) -> Job:
    """Check the body of ``/generate``.

    A batch is checked element by element; the error names the first that is wrong.

    Raises:
        RequestRefused: it must not reach a worker.
    """
    stream = take_bool(payload, "stream")
    if take_bool(payload, "background"):
        raise RequestRefused(
            "background is for /v1/responses", param="background", code="unsupported_parameter"
        )
    prompts, is_batch = _prompts(payload, limits)
    sampling, choices = _sampling(payload.get("sampling_params"), len(prompts), is_batch, limits)
    if not _PER_PROMPT.isdisjoint(payload):
        _check_lists(payload, len(prompts), is_batch)
        _check_logprobs(payload, limits)
    opaque = _has_media(payload)
    spaces = namespaces(payload, len(prompts))
    return Job(
        Endpoint.GENERATE,
        stream,
        tuple(
            PromptInput(
                ids=None if opaque and prompt.text is not None else prompt.ids,
                text=prompt.text,
                opaque=opaque or prompt.opaque,
                namespace=space,
                max_new_tokens=max_new,
            )
            for prompt, space, max_new in zip(prompts, spaces, sampling, strict=True)
        ),
        choices,
    )


def _has_media(payload: Json) -> bool:
    return not MEDIA_FIELDS.isdisjoint(payload) and any(payload.get(name) for name in MEDIA_FIELDS)


def _prompts(payload: Json, limits: Limits) -> tuple[list[PromptInput], bool]:
    """The prompts, and whether they are a batch."""
    given = [name for name in ("text", "input_ids", "input_embeds") if payload.get(name) is not None]
    if len(given) != 1:
        raise RequestRefused(
            "give exactly one of text, input_ids and input_embeds; "
            + (f"there are {' and '.join(given)}" if given else "there is none"),
            param=given[1] if given else "text",
            code="invalid_prompt",
        )
    name = given[0]
    value = payload[name]
    if name == "input_embeds":  # a worker refuses them unless it was started without a radix cache
        return [PromptInput(text="", opaque=True)], False
    if name == "text":
        return _texts(value, allow_empty=_has_media(payload))
    if type(value) is list and value and type(value[0]) is list:
        return [
            PromptInput(ids=_ids(ids, f"input_ids[{index}]", limits)) for index, ids in enumerate(value)
        ], True
    session = payload.get("session_params")
    if value == [] and isinstance(session, dict) and session.get("id"):
        return [PromptInput(text="", opaque=True)], False  # the session's history is the prompt
    return [PromptInput(ids=_ids(value, "input_ids", limits))], False


def _ids(value: Any, field: str, limits: Limits) -> Any:
    ids = check_ids(value, field, limits.vocab_size)
    if not ids:
        raise RequestRefused(f"{field} is empty", param=field, code="empty_prompt")
    return ids


def _texts(value: Any, *, allow_empty: bool) -> tuple[list[PromptInput], bool]:
    if type(value) is str:
        if not value and not allow_empty:
            raise RequestRefused("text is empty", param="text", code="empty_prompt")
        return [PromptInput(text=value)], False
    if type(value) is not list:
        raise wrong("text", "a string or an array of strings", value)
    if not value:
        raise RequestRefused("text is an empty array", param="text", code="empty_prompt")
    for index, item in enumerate(value):
        if type(item) is not str:
            raise wrong(f"text[{index}]", "a string", item)
        if not item and not allow_empty:
            raise RequestRefused(f"text[{index}] is empty", param=f"text[{index}]", code="empty_prompt")
    return [PromptInput(text=item) for item in value], True


def _sampling(value: Any, count: int, is_batch: bool, limits: Limits) -> tuple[list[int | None], int]:
    """(max_new_tokens per prompt, choices per prompt)."""
    if value is None:
        return [None] * count, 1
    if type(value) is dict:
        return [_one_sampling(value, "sampling_params.", limits)] * count, take_choices(
            value, "sampling_params."
        )
    if type(value) is not list:
        raise wrong("sampling_params", "an object or an array of objects", value)
    _check_length("sampling_params", value, count, is_batch)
    limits_per_prompt: list[int | None] = []
    choices: set[int] = set()
    for index, item in enumerate(value):
        prefix = f"sampling_params[{index}]."
        if type(item) is not dict:
            raise wrong(prefix[:-1], "an object", item)
        limits_per_prompt.append(_one_sampling(item, prefix, limits))
        choices.add(take_choices(item, prefix))
    if len(choices) > 1:
        raise RequestRefused(
            f"sampling_params must have the same n for every prompt, not {sorted(choices)}",
            param="sampling_params",
            code="invalid_value",
        )
    return limits_per_prompt, choices.pop()


def _one_sampling(value: Json, prefix: str, limits: Limits) -> int | None:
    check_sampling(value, limits, prefix)
    return take_int(value, "max_new_tokens", least=0, prefix=prefix)


def _check_lists(payload: Json, count: int, is_batch: bool) -> None:
    """A server takes a list that is too short, and breaks off its answer where it looks for the rest."""
    for name in _PER_PROMPT:
        value = payload.get(name)
        if type(value) is list:
            _check_length(name, value, count, is_batch)


def _check_length(name: str, value: list[Any], count: int, is_batch: bool) -> None:
    """A list with an element for each prompt."""
    if not is_batch:
        raise RequestRefused(
            f"{name} is an array, but there is only one prompt; give one value",
            param=name,
            code="invalid_type",
        )
    if len(value) != count:
        raise RequestRefused(
            f"{name} has {len(value)} elements for {count} prompts", param=name, code="invalid_length"
        )


def _check_logprobs(payload: Json, limits: Limits) -> None:
    """More top logprobs than the vocabulary has entries, or fewer than none, bring the scheduler down."""
    value = payload.get("top_logprobs_num")
    for index, item in enumerate(value if type(value) is list else [value]):
        field = f"top_logprobs_num[{index}]" if type(value) is list else "top_logprobs_num"
        if item is None:
            continue
        if type(item) is not int:
            raise wrong(field, "an integer", item)
        if not 0 <= item <= limits.vocab_size:
            raise RequestRefused(
                f"{field} must be between 0 and {limits.vocab_size}, the size of the vocabulary, not {item}",
                param=field,
                code="out_of_range",
            )
    for name in ("return_logprob", "logprob_start_len"):
        value = payload.get(name)
        kind: tuple[type, ...] = (bool,) if name == "return_logprob" else (int,)
        for item in value if type(value) is list else [value]:
            if item is not None and type(item) not in kind:
                what = "booleans" if kind == (bool,) else "integers"
                raise RequestRefused(
                    f"{name} must consist of {what}, not {json_type(item)}", param=name, code="invalid_type"
                )
