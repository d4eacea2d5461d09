"""Refuse the values of a request that would end a scheduler.

Change: hooks at four places.

- around the reading of a request's shape: ``n`` is bounded, as the request is repeated in memory so many
  times before anything of it is checked. Errors other than ``ValueError``, and request ids that are no
  strings, are answered with a 400 instead of a 500;
- around the making of a tokenized request: a request to generate ends the scheduler of a model that embeds or
  classifies; it is refused. SGLang compares values as they came (``"8" <= 4``), so that a wrong type raises
  ``TypeError``. It becomes a ``ValueError``, a 400 that names the field;
- before a message is sent to the scheduler: it is encoded and decoded as the scheduler would do it, and every
  number in it has to fit the tensors that the scheduler makes of it. The names by which caches tell requests
  apart are bounded: schedulers keep them as long as the KV. So are grammars, which are compiled. The
  scheduler decodes messages, and builds the tensors of a batch, where no exception is caught: its process,
  and with it the server, would end;
- around the admission of a request in the scheduler: its sampling is built once for it alone, as it would
  be for a batch. The prompt of a request to embed or classify is checked, because SGLang accepts prompts that
  are empty, too long or outside the vocabulary. So are vectors in place of embeddings, which must have the
  model's width. A half of a pair refuses more log probabilities than prefill hands over. An exception is
  reported as the end of that request.

Why no extension point serves: there is none for the validation of requests.

For: any device. A server behind the router refuses most of such requests there first.
Can go: when SGLang's scheduler answers for a request that it cannot take.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from sglang_ext.patches.hooks.vocabulary import EMPTY, out_of_vocabulary
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

logger = logging.getLogger(__name__)

_REQUESTS = "sglang.srt.managers.io_struct"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

INT32: Final = 1 << 31
"""Integers are below this: SGLang makes 32-bit tensors of most."""
INT64: Final = 1 << 63
WIDE: Final = frozenset({"sampling_seed", "bootstrap_room"})
"""Integers of 64 bits."""
MAX_BIAS: Final = 1e30
"""Of a logit bias: divided by the least temperature (1e-6), it has to stay finite in 32 bits."""
FLOAT32_MAX: Final = 3.4028234663852886e38
MAX_CHOICES: Final = 4096
"""Largest ``n``, as of the router (``router/api/validation.py``)."""
MAX_NAME_CHARACTERS: Final = 1024
"""Of names of a request: a router lets 512 through (``router/api/validation.py``) and puts a tenant's in
front, and SGLang appends an adapter's id."""
NAMES: Final = ("extra_key", "cache_salt", "rid", "session_id")
MAX_GRAMMAR_CHARACTERS: Final = 1 << 16
"""Of a regular expression, JSON schema or other grammar: compiled, it takes 200 times as many bytes."""
GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
UNBOUNDED: Final = frozenset({"custom_params", "watermark", "kv_hints"})
"""Fields with objects of the client's, whose numbers SGLang does not put into tensors by itself."""
BULK: Final = ("input_ids", "mm_inputs", "input_embeds", "time_stats")
"""Large fields that SGLang has made or checked itself. They are left out, so that the check of a long prompt
takes as long as that of a short one."""


def check_message(
    message: msgspec.Struct, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
) -> None:
    """Check one request on its way to the scheduler.

    Args:
        message: a tokenized request, not changed.
        encode, decode: as sender and scheduler do.

    Raises:
        ValueError: naming the field and its permitted values.
    """
    for name in NAMES:
        value = getattr(message, name, None)
        if isinstance(value, str) and len(value) > MAX_NAME_CHARACTERS:
            raise ValueError(f"{name} has {len(value)} characters, and may have {MAX_NAME_CHARACTERS}")
    for name in GRAMMARS:
        value = getattr(getattr(message, "sampling_params", None), name, None)
        if isinstance(value, str) and len(value) > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(f"{name} has {len(value)} characters, and may have {MAX_GRAMMAR_CHARACTERS}")
    light = msgspec.structs.replace(
        message, **{name: None for name in BULK if getattr(message, name, None) is not None}
    )
    for path, value in _numbers(light, ""):
        if problem := number_problem(path, value):
            raise ValueError(problem)
    try:
        decode(encode(light))
    except msgspec.ValidationError as error:
        raise ValueError(explained(light, str(error))) from None
    except Exception as error:
        raise ValueError(f"the request cannot be sent to the scheduler: {error}") from error


def number_problem(path: str, value: float) -> str:
    """The fault of a number of a request; empty when it has none.

    Args:
        path: of the field, as ``sampling_params.top_k``.
    """
    if isinstance(value, int):
        limit, bits = (INT64, 64) if path.rpartition(".")[2] in WIDE else (INT32, 32)
        if -limit <= value < limit:
            return ""
        return f"{path} must be an integer of {bits} bits, from {-limit} to {limit - 1}, not {value}"
    most = MAX_BIAS if ".logit_bias[" in path else FLOAT32_MAX
    if math.isfinite(value) and abs(value) <= most:
        return ""
    return f"{path} must be a finite number from {-most:g} to {most:g}, not {value}"


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    """(path, number) of all numbers in a message."""
    if isinstance(value, bool) or value is None or isinstance(value, str | bytes):
        return
    if isinstance(value, int | float):
        yield path, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in UNBOUNDED:
                yield from _numbers(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | set):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")


_PATH = re.compile(r" - at `\$((?:\[[^\]]*\])*)`$")


def explained(message: msgspec.Struct, error: str) -> str:
    """msgspec's error about an encoded message, with the names of fields in place of their numbers."""
    found = _PATH.search(error)
    if found is None:
        return error
    at: Any = message
    path = ""
    for word in re.findall(r"\[([^\]]*)\]", found[1]):
        if isinstance(at, msgspec.Struct) and word.isdecimal():
            index = int(word) - (at.__struct_config__.tag is not None)
            names = at.__struct_fields__
            if not 0 <= index < len(names):
                break
            path += f".{names[index]}" if path else names[index]
            at = getattr(at, names[index])
        else:
            path += f"[{word}]"
            at = at[int(word)] if isinstance(at, list | tuple) and word.isdecimal() else None
    return f"{path}: {error[: found.start()]}" if path else error


def wrong_types(values: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """The names of values that do not have the type that the struct declares; empty when all have it."""
    problems = []
    for field in msgspec.structs.fields(kind):
        value = values.get(field.name)
        if value is None:
            continue
        try:
            msgspec.convert(value, field.type)
        except (msgspec.ValidationError, TypeError) as error:
            problems.append(f"{field.name}: {error}")
    return "; ".join(problems)


def check_choices(given: Any) -> None:
    """Check ``n`` of the sampling parameters of one prompt, or of several.

    Raises:
        ValueError: there is one above `MAX_CHOICES`.
    """
    for one in given if isinstance(given, list) else [given]:
        choices = one.get("n") if isinstance(one, Mapping) else None
        if isinstance(choices, int | float) and not choices <= MAX_CHOICES:
            raise ValueError(f"n must be at most {MAX_CHOICES}, not {choices}")


# -- hooks --------------------------------------------------------------------------------------------


def around_shape(stock: Callable[[Any], None], obj: Any) -> None:
    """Around ``normalize_batch_and_arguments``.

    Raises:
        ValueError: the request's values cannot be used.
    """
    check_choices(obj.sampling_params)
    try:
        stock(obj)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the request cannot be used: {error}") from error
    ids = [obj.rid] if obj.is_single else obj.rid
    if any(not isinstance(rid, str) for rid in ids):
        raise ValueError("rid must be a string, or for several prompts an array with a string for each")


def around_tokenized(stock: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``_create_tokenized_object``.

    Raises:
        ValueError: the request's values cannot be used.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    if isinstance(obj, GenerateReqInput) and not manager.is_generation:
        raise ValueError(
            "the model of this server embeds, classifies or scores, and generates no text; ask it at "
            "/v1/embeddings, /encode, /v1/classify, /classify, /v1/score or /v1/rerank"
        )
    try:
        return stock(manager, obj, *args, **kwargs)
    except ValueError:
        raise
    except re.error as error:
        raise ValueError(f"stop_regex is not a regular expression: {error}") from error
    except Exception as error:
        given = obj.sampling_params if isinstance(obj.sampling_params, Mapping) else {}
        named = wrong_types(given, manager.sampling_params_class)
        reason = f"sampling_params: {named}" if named else f"the request cannot be used: {error}"
        raise ValueError(reason) from error


def before_dispatch(_manager: Any, obj: Any) -> None:
    """Before ``_dispatch_to_scheduler``.

    Raises:
        ValueError: the scheduler could not take the message.
    """
    from sglang.srt.managers import io_struct

    batches = (io_struct.BatchTokenizedGenerateReqInput, io_struct.BatchTokenizedEmbeddingReqInput)
    for request in obj.batch if isinstance(obj, batches) else (obj,):
        if isinstance(request, io_struct.TokenizedGenerateReqInput | io_struct.TokenizedEmbeddingReqInput):
            check_message(request, io_struct.msgpack_encode, io_struct.msgpack_decode)


def check_logprobs(message: Any, scheduler: Any) -> None:
    """Check which log probabilities a request asks for. SGLang takes the likeliest of the whole vocabulary.

    Raises:
        ValueError: more than there are, more than prefill hands over with the first token, or from a position
            that there is not.
    """
    most, vocab_size = message.top_logprobs_num, scheduler.model_config.vocab_size
    if not 0 <= most <= vocab_size:
        raise ValueError(f"top_logprobs_num must be from 0 to {vocab_size}, not {most}")
    if message.return_logprob and hasattr(scheduler, "disagg_metadata_buffers"):
        check_handed_logprobs(message, scheduler.disagg_metadata_buffers)
    if message.logprob_start_len < -1:
        raise ValueError(f"logprob_start_len must be at least -1, not {message.logprob_start_len}")


def check_handed_logprobs(message: Any, rows: Any) -> None:
    """Check which log probabilities a request asks for where prefill and decode are apart.

    Args:
        message: the tokenized request, of which one prompt's pictures are not counted yet.
        rows: SGLang's metadata buffers. A prefill server that has more for one of them than fits ends.

    Raises:
        ValueError: more than is handed over.
    """
    from sglang_ext.engine.pd.prompt_logprobs import MAX_BYTES, bytes_for, too_large

    top, most = message.top_logprobs_num, rows.output_top_logprobs_val.shape[1]
    if top > most:
        raise ValueError(
            f"top_logprobs_num must be from 0 to {most} where prefill and decode are apart, not {top}"
        )
    start = message.logprob_start_len
    if start >= 0 and message.input_ids is not None:
        positions = max(0, len(message.input_ids) - start)
        nbytes = bytes_for(positions, top, len(message.token_ids_logprob or ()))
        if nbytes > MAX_BYTES:
            raise ValueError(too_large(nbytes))


def check_pooled(message: Any, scheduler: Any) -> None:
    """Check the prompt of a request to embed or classify. SGLang computes it although its own check fails.

    Raises:
        ValueError: the scheduler would end, or never answer.
    """
    from sglang.srt.runtime_context import get_serving

    if (
        message.mm_inputs is None
    ):  # of pictures, there are hashes among the tokens, and their number is checked
        if not message.input_ids:
            raise ValueError(EMPTY)
        if problem := out_of_vocabulary(message.input_ids, scheduler.model_config.vocab_size):
            raise ValueError(problem)
        most = scheduler.max_req_input_len
        if len(message.input_ids) >= most and not get_serving().allow_auto_truncate:
            raise ValueError(
                f"The prompt has {len(message.input_ids)} tokens; the KV pool of this server takes prompts "
                f"of fewer than {most}. Raise --max-total-tokens"
            )
    overrides = message.positional_embed_overrides
    shape = getattr(getattr(overrides, "embeds", None), "shape", None)  # none of a handle to a GPU's memory
    width = scheduler.model_config.hidden_size
    if shape is not None and shape[-1] != width:
        raise ValueError(
            f"vectors in the place of embeddings have {shape[-1]} numbers, and the model's embeddings {width}"
        )


class Alone:
    """A message to the scheduler in the place of the request that the scheduler makes of it.

    Args:
        message: the tokenized request.
        scheduler: gives the tokenizer and the EOS ids, as it would to a request.
    """

    def __init__(self, message: Any, scheduler: Any) -> None:
        self._message = message
        self.tokenizer = scheduler.tokenizer
        self.eos_token_ids = scheduler.model_config.hf_eos_token_id

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._message, name)
        except AttributeError:
            raise NotTriedError(name) from None


class BatchOfOne:
    """The part of a batch that SGLang reads when it builds the sampling. It keeps a weak reference to it."""

    device = "cpu"

    def __init__(self, request: Alone) -> None:
        self.reqs = [request]


class NotTriedError(Exception):
    """A message lacks an attribute that SGLang reads of a request."""


def asks_of_sampling(message: Any) -> bool:
    """Whether a request has a processor, a bias or penalties of its own."""
    params = message.sampling_params
    return bool(
        getattr(message, "custom_logit_processor", None)
        or params.logit_bias
        or params.min_new_tokens
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
    )


def check_sampling(message: Any, scheduler: Any) -> None:
    """Build a request's sampling for it alone, as a batch with it would.

    On the CPU, whatever the server's device is, and only for requests that ask for more than a temperature
    and bounds, which `check_message` has checked.

    Raises:
        ValueError: it cannot be built.
    """
    if not asks_of_sampling(message):
        return
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch: Any = BatchOfOne(Alone(message, scheduler))
    try:
        SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    except NotTriedError as missing:
        logger.debug("cannot try the sampling of a request: it has no %s", missing)
    except Exception as problem:
        raise ValueError(f"the sampling parameters cannot be used: {problem}") from problem


def around_admission(
    stock: Callable[..., None], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> None:
    """Around ``handle_generate_request`` and ``handle_embedding_request``, on all ranks alike."""
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput

    try:
        if isinstance(recv_req, TokenizedEmbeddingReqInput):
            check_pooled(recv_req, scheduler)
        else:
            check_logprobs(recv_req, scheduler)
        check_sampling(recv_req, scheduler)
        stock(scheduler, recv_req, *args, **kwargs)
    except Exception as error:
        logger.warning("request %s is refused: %s", recv_req.rid, error, exc_info=error)
        from sglang.srt.managers.io_struct import AbortReq

        reason = {
            "type": "abort",
            "status_code": HTTPStatus.BAD_REQUEST,
            "message": f"the request cannot be admitted: {error}",
        }
        scheduler.ipc_channels.send_to_tokenizer.send_output(
            AbortReq(rid=recv_req.rid, finished_reason=reason), recv_req
        )


PATCH = hook_patch(
    "request_values",
    "answer values that the scheduler cannot take with a 400 instead of dying",
    Hook(f"{_REQUESTS}.GenerateReqInput.normalize_batch_and_arguments", "around", around_shape),
    Hook(f"{_REQUESTS}.EmbeddingReqInput.normalize_batch_and_arguments", "around", around_shape),
    Hook(f"{_MANAGER}._create_tokenized_object", "around", around_tokenized),
    Hook(f"{_MANAGER}._dispatch_to_scheduler", "before", before_dispatch),
    Hook(f"{_SCHEDULER}.handle_generate_request", "around", around_admission),
    Hook(f"{_SCHEDULER}.handle_embedding_request", "around", around_admission),
)
