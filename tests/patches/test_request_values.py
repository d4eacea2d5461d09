"""Values of requests that are refused before a scheduler sees them, and the treatment of the others."""

from __future__ import annotations

import re
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.engine.pd import prompt_logprobs
from sglang_ext.patches.adapter.own_requests import SglangHost
from sglang_ext.patches.hooks import request_values

VOCABULARY = 100


def message(sampling: dict[str, Any] | None = None, **fields: Any) -> io_struct.TokenizedGenerateReqInput:
    """A request as SGLang's tokenizer process sends it on."""
    params = SamplingParams(**{"max_new_tokens": 2, **(sampling or {})})
    given: dict[str, Any] = {
        "rid": "r", "input_text": "", "input_ids": array("q", [1, 2]), "input_embeds": None,
        "mm_inputs": None, "token_type_ids": None, "sampling_params": params, "return_logprob": False,
        "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": None, "stream": False,
    }  # fmt: skip
    return io_struct.TokenizedGenerateReqInput(**{**given, **fields})


def refused(request: msgspec.Struct) -> str:
    """Why a message is refused on its way; empty when it is not."""
    try:
        request_values.before_dispatch(None, request)
    except ValueError as error:
        return str(error)
    return ""


def test_what_the_scheduler_can_take_passes() -> None:
    sampling = {
        "top_k": 2**31 - 1,
        "sampling_seed": 2**63 - 1,
        "temperature": 0.5,
        "logit_bias": {"5": -100.0},
        "custom_params": {"big": 2**40},
    }
    assert refused(message(sampling, bootstrap_room=2**62)) == ""
    assert refused(io_struct.BatchTokenizedGenerateReqInput(batch=[message(), message(sampling)])) == ""
    assert refused(io_struct.AbortReq(rid="r")) == "", "other messages are not looked at"


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # sampling parameters, other fields, the beginning of the message
    ({"top_k": 2**31}, {}, "sampling_params.top_k must be an integer of 32 bits, from -2147483648 to"),
    ({"top_k": -(2**31) - 1}, {}, "sampling_params.top_k must be"),
    ({"sampling_seed": 2**63}, {}, "sampling_params.sampling_seed must be an integer of 64 bits"),
    ({"max_new_tokens": 2**64}, {}, "sampling_params.max_new_tokens must be"),
    ({"temperature": 1e300}, {}, "sampling_params.temperature must be a finite number"),
    ({"temperature": float("nan")}, {}, "sampling_params.temperature must be a finite number"),
    ({"logit_bias": {"5": 1e31}}, {}, "sampling_params.logit_bias['5'] must be a finite number from -1e+30"),
    ({"stop_token_ids": [2**40]}, {}, "sampling_params.stop_token_ids[0] must be"),
    ({"top_k": 1.5}, {}, "sampling_params.top_k: Expected `int`, got `float`"),
    ({"ignore_eos": "yes"}, {}, "sampling_params.ignore_eos: Expected `bool`, got `str`"),
    ({"custom_params": {"a": [[1]]}}, {}, "sampling_params.custom_params[...]"),
    ({"custom_params": {"a": 2**70}}, {}, "the request cannot be sent to the scheduler: "),
    ({}, {"priority": 2**31}, "priority must be an integer of 32 bits"),
    ({}, {"token_ids_logprob": ["x"]}, "token_ids_logprob[0]: Expected `int`, got `str`"),
    ({}, {"positional_embed_overrides": "(("}, "positional_embed_overrides: Expected `array"),
    ({}, {"lora_id": 7}, "lora_id: Expected `str | null`, got `int`"),
]


@pytest.mark.parametrize(("sampling", "fields", "words"), WRONG)
def test_what_it_cannot_take_is_refused_by_name(
    sampling: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    request = message(**fields)
    for name, value in sampling.items():
        setattr(request.sampling_params, name, value)
    assert refused(request).startswith(words)
    assert refused(io_struct.BatchTokenizedGenerateReqInput(batch=[message(), request])).startswith(words)


def test_the_twin_what_is_refused_for_its_type_cannot_be_decoded() -> None:
    request = message()
    request.sampling_params.top_k = 1.5  # type: ignore[assignment]
    with pytest.raises(msgspec.ValidationError):
        io_struct.msgpack_decode(io_struct.msgpack_encode(request))


def test_a_long_prompt_is_not_copied() -> None:
    sent = []

    def encode(light: Any) -> bytes:
        sent.append(light.input_ids)
        return io_struct.msgpack_encode(light)

    long = message(input_ids=array("q", range(1000)))
    request_values.check_message(long, encode, io_struct.msgpack_decode)
    assert sent == [None]
    assert len(long.input_ids) == 1000


def manager() -> Any:
    return SimpleNamespace(sampling_params_class=SamplingParams)


def test_a_wrong_type_is_named_where_sglang_raises_a_type_error() -> None:
    def stock(_manager: Any, obj: Any) -> Any:
        params = SamplingParams(**obj.sampling_params)
        params.verify(VOCABULARY)

    def given(**sampling: Any) -> Any:
        return SimpleNamespace(sampling_params=sampling)

    for sampling, words in (
        ({"temperature": "0"}, "sampling_params: temperature: Expected `float`, got `str`"),
        ({"n": 1, "nothing": 5}, "the request cannot be used: "),
        ({"top_p": 5.0}, "top_p must be in (0, 1]"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
            request_values.around_tokenized(stock, manager(), given(**sampling))


def test_a_pattern_that_is_no_regular_expression_is_named() -> None:
    def stock(_manager: Any, obj: Any) -> Any:
        params = SamplingParams(**obj.sampling_params)
        params.normalize(None)

    request = SimpleNamespace(sampling_params={"stop_regex": "(("})
    with pytest.raises(ValueError, match="stop_regex is not a regular expression: missing"):
        request_values.around_tokenized(stock, manager(), request)


@pytest.mark.parametrize("rid", [[], ["x"], 7, {"a": 1}])
def test_an_id_that_is_no_string_is_refused(rid: Any) -> None:
    request = io_struct.GenerateReqInput(text="a", rid=rid, sampling_params={})
    with pytest.raises(ValueError, match="rid"):
        request_values.around_shape(io_struct.GenerateReqInput.normalize_batch_and_arguments, request)


@pytest.mark.parametrize("n", [4097, 2**31, 2**63 - 1, 1e300])
def test_choices_are_bounded_before_the_request_is_repeated(n: Any) -> None:
    request = io_struct.GenerateReqInput(text="a", sampling_params={"n": n})
    with pytest.raises(ValueError, match="n must be at most 4096"):
        request_values.around_shape(lambda obj: pytest.fail("it was repeated"), request)


def scheduler(sent: list[Any]) -> Any:
    output = SimpleNamespace(send_output=lambda reply, request: sent.append(reply))
    model = SimpleNamespace(vocab_size=VOCABULARY, hf_eos_token_id={2})
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
    return SimpleNamespace(
        model_config=model, tokenizer=tokenizer, ipc_channels=SimpleNamespace(send_to_tokenizer=output)
    )


@pytest.mark.parametrize(
    ("sampling", "fields", "words"),
    [
        ({"min_new_tokens": 1, "stop_token_ids": [VOCABULARY + 5]}, {}, "sampling parameters cannot be used"),
        ({"logit_bias": {"x": 1.0}}, {}, "sampling parameters cannot be used"),
        ({}, {"top_logprobs_num": VOCABULARY + 1}, "top_logprobs_num must be from 0 to 100"),
        ({}, {"logprob_start_len": -2}, "logprob_start_len must be at least -1"),
    ],
)
@pytest.mark.usefixtures("sampling_context")
def test_the_scheduler_answers_for_what_it_cannot_admit(
    sampling: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    sent: list[Any] = []
    admit = request_values.around_admission
    admit(lambda *_: pytest.fail("it was admitted"), scheduler(sent), message(sampling, **fields))
    assert [reply.rid for reply in sent] == ["r"]
    assert sent[0].finished_reason["status_code"] == 400
    assert words in sent[0].finished_reason["message"]


@pytest.mark.usefixtures("sampling_context")
def test_what_it_can_admit_is_admitted_once() -> None:
    sent: list[Any] = []
    admitted: list[Any] = []
    for sampling in ({}, {"repetition_penalty": 1.1, "min_new_tokens": 1, "logit_bias": {"5": 1.0}}):
        request_values.around_admission(
            lambda _scheduler, request: admitted.append(request), scheduler(sent), message(sampling)
        )
    assert len(admitted) == 2
    assert not sent


@pytest.mark.usefixtures("sampling_context")
@pytest.mark.parametrize(("top", "asked", "admitted"), [(9, True, False), (8, True, True), (9, False, True)])
def test_a_half_of_a_pair_takes_as_many_top_logprobs_as_a_row_of_its_metadata(
    top: int, asked: bool, admitted: bool
) -> None:
    """SGLang's prefill raises beyond it, and ends. A server by itself has no such rows."""
    sent: list[Any] = []
    taken: list[Any] = []
    half = scheduler(sent)
    request = message(top_logprobs_num=top, return_logprob=asked)
    rows = SimpleNamespace(output_top_logprobs_val=torch.zeros(2, 8))
    for has_rows in (False, True):
        if has_rows:
            half.disagg_metadata_buffers = rows
        request_values.around_admission(lambda _scheduler, request: taken.append(request), half, request)
    assert len(taken) == 1 + admitted
    assert bool(sent) is not admitted
    if sent:
        assert "top_logprobs_num must be from 0 to 8" in sent[0].finished_reason["message"]


@pytest.mark.usefixtures("sampling_context")
@pytest.mark.parametrize(("start", "admitted"), [(0, False), (1, True), (-1, True)])
def test_more_log_probabilities_of_a_prompt_than_are_handed_over_are_refused_at_once(
    start: int, admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before prefill computes the prompt."""
    sent: list[Any] = []
    taken: list[Any] = []
    half = scheduler(sent)
    half.disagg_metadata_buffers = SimpleNamespace(output_top_logprobs_val=torch.zeros(2, 8))
    # Two tokens: 4 bytes, and for each 8, 4 + 8 * 2 and 4 + 8 * 3.
    monkeypatch.setattr(prompt_logprobs, "MAX_BYTES", 4 + 2 * (8 + 20 + 28) - 1)
    request = message(
        top_logprobs_num=2, token_ids_logprob=[1, 2, 3], return_logprob=True, logprob_start_len=start
    )
    request_values.around_admission(lambda _scheduler, request: taken.append(request), half, request)
    assert (bool(taken), bool(sent)) == (admitted, not admitted)
    if sent:
        reason = sent[0].finished_reason
        assert reason["status_code"] == 400
        assert "take 116 bytes" in reason["message"]


def test_what_raises_in_the_admission_ends_that_request_only() -> None:
    sent: list[Any] = []

    def stock(_scheduler: Any, _request: Any) -> None:
        raise KeyError("no such thing")

    request_values.around_admission(stock, scheduler(sent), message())
    assert "no such thing" in sent[0].finished_reason["message"]


# -- models that embed or classify -------------------------------------------------------------------


def test_a_request_to_generate_is_refused_where_the_model_embeds() -> None:
    def ask(kind: Any, is_generation: bool) -> list[Any]:
        tokenized: list[Any] = []
        manager = SimpleNamespace(sampling_params_class=SamplingParams, is_generation=is_generation)
        request = kind(text="a", sampling_params={})
        request_values.around_tokenized(lambda _manager, obj: tokenized.append(obj), manager, request)
        return tokenized

    for kind, is_generation in (
        (io_struct.GenerateReqInput, True),
        (io_struct.EmbeddingReqInput, True),
        (io_struct.EmbeddingReqInput, False),
    ):
        assert len(ask(kind, is_generation)) == 1
    with pytest.raises(ValueError, match="generates no text; ask it at /v1/embeddings"):
        ask(io_struct.GenerateReqInput, False)


def pooled(**fields: Any) -> io_struct.TokenizedEmbeddingReqInput:
    """A request to embed or classify as SGLang's tokenizer process sends it on."""
    given: dict[str, Any] = {
        "rid": "r", "input_text": "", "input_ids": array("q", [1, 2]), "mm_inputs": None,
        "token_type_ids": None, "sampling_params": SamplingParams(max_new_tokens=0),
    }  # fmt: skip
    return io_struct.TokenizedEmbeddingReqInput(**{**given, **fields})


def overridden(width: int) -> PositionalEmbeds:
    return PositionalEmbeds(embeds=torch.zeros(1, width), positions=[0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": array("q", [])}, "The prompt is empty"),
        ({"input_ids": None}, "The prompt is empty"),
        ({"input_ids": array("q", [1, VOCABULARY])}, "input_ids[1] is 100, outside the vocabulary"),
        ({"input_ids": array("q", [-1])}, "input_ids[0] is -1, outside the vocabulary"),
        ({"input_ids": array("q", [1] * 20)}, "fewer than 20. Raise --max-total-tokens"),
        ({"positional_embed_overrides": overridden(3)}, "have 3 numbers, and the model's embeddings 8"),
        ({}, ""),
        ({"input_ids": array("q", [1] * 19), "positional_embed_overrides": overridden(8)}, ""),
    ],
)
@pytest.mark.parametrize("truncates", [False, True])
def test_a_prompt_to_embed_is_checked(
    fields: dict[str, Any], words: str, truncates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(
        runtime_context, "get_serving", lambda: SimpleNamespace(allow_auto_truncate=truncates)
    )
    sent: list[Any] = []
    admitted: list[Any] = []
    of = scheduler(sent)
    of.model_config.hidden_size, of.max_req_input_len = 8, 20
    request_values.around_admission(
        lambda _scheduler, request: admitted.append(request), of, pooled(**fields)
    )
    cut = truncates and "fewer than" in words
    assert len(admitted) == (not words or cut)
    assert [words in reply.finished_reason["message"] for reply in sent] == [True] * (bool(words) and not cut)


def test_a_model_that_embeds_computes_no_request_of_our_own() -> None:
    host = SglangHost(None)
    host.meet(SimpleNamespace(is_generation=False))
    assert host.start("hint", [1, 2], None, None) is None


@pytest.fixture
def sampling_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's settings that building the sampling of a batch looks at."""
    from sglang.srt.sampling import sampling_batch_info

    settings = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        features=SimpleNamespace(enable_custom_logit_processor=False, enable_watermark=False),
    )
    monkeypatch.setattr(sampling_batch_info, "get_exec", lambda: settings)
