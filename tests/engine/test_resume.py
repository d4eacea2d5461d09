"""What a request takes along when it is moved, and what keeps it where it is."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_ext.engine.resume import AGAIN, Resume, obstacle, put_back, replay, resume_of, state_of
from sglang_ext.errors import UserError


def request(**fields: Any) -> Any:
    sampling = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    sampling |= {name: fields.pop(name) for name in list(fields) if name in sampling}
    nothing = dict.fromkeys(
        (
            "return_logprob", "custom_logit_processor", "multimodal_inputs", "input_embeds",
            "positional_embed_overrides", "session", "session_id", "lora_id", "beam_group",
            "return_hidden_states", "return_routed_experts", "return_indexer_topk",
            "return_sampling_mask", "customized_info", "grammar", "bootstrap_host",
        )
    )  # fmt: skip
    return SimpleNamespace(
        **{
            **nothing,
            "bootstrap_port": 8998,
            "sampling_params": SimpleNamespace(**sampling),
            "origin_input_ids": array("q", [5, 6, 7]),
            "output_ids": array("q", [8, 9]),
            "cached_tokens": 3,
            "cached_tokens_device": 2,
            "cached_tokens_host": 1,
            "cached_tokens_storage": 0,
            **fields,
        }
    )


def test_what_is_taken_along_comes_back() -> None:
    req = request(bootstrap_host="10.0.0.1", min_new_tokens=5)
    resume = resume_of(msgspec.json.decode(state_of(req, received=True)), 100)
    assert resume == Resume([8, 9], 3, (3, 2, 1, 0), received=True, home=("10.0.0.1", 8998))
    other = request(output_ids=array("q"), cached_tokens=0, cached_tokens_device=0, min_new_tokens=5)
    put_back(other, resume)
    assert list(other.output_ids) == [8, 9]
    assert (other.cached_tokens, other.cached_tokens_device, other.cached_tokens_host) == (3, 2, 1)
    # Two of the five have come.
    assert other.sampling_params.min_new_tokens == 3


def test_grammar_and_counts_follow_the_output() -> None:
    accepted: list[int] = []
    counted: list[int] = []
    req = request(grammar=SimpleNamespace(accept_token=accepted.append))
    replay(req, Resume([8, 9], 3), lambda _req, token: counted.append(token))
    assert accepted == counted == [8, 9]
    counted.clear()
    replay(req, Resume([8, 9], 3, received=True), lambda _req, token: counted.append(token))
    # SGLang counts the token that comes with the KV.
    assert (accepted, counted) == ([8, 9, 8, 9], [8])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"output_ids": array("q")}, AGAIN),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"return_logprob": True}, "log probabilities"),
        ({"lora_id": "x"}, "a LoRA adapter"),
        ({"session_id": "x"}, "a session at the server"),
        ({"multimodal_inputs": object()}, "inputs other than tokens"),
        ({"return_hidden_states": True}, "internals of the model in the answer"),
        ({"min_new_tokens": 9}, ""),
    ],
)
def test_what_cannot_be_rebuilt_stays(fields: dict[str, Any], why: str) -> None:
    assert obstacle(request(**fields), False) == why


def test_a_draft_model_s_state_stays() -> None:
    assert obstacle(request(), True) == "speculative decoding"


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"output_ids": [], "prompt_tokens": 3},
        {"output_ids": [100], "prompt_tokens": 3},
        {"output_ids": [-1], "prompt_tokens": 3},
        {"output_ids": [1], "prompt_tokens": 3, "more": 1},
        {"output_ids": ["1"], "prompt_tokens": 3},
    ],
)
def test_what_is_no_state_is_refused(value: Any) -> None:
    """A token id that the model lacks would kill the scheduler."""
    with pytest.raises(UserError):
        resume_of(value, 100)
