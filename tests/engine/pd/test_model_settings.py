"""Settings of models by name, and which of two servers' differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.engine.model_settings import LETTERS, MOST_WITHIN, model_settings
from sglang_ext.engine.pd.messages import MESSAGES, RankInfo, Register
from sglang_ext.engine.pd.peers import Local, require_fit
from sglang_ext.wire import WireError


def settings(**values: Any) -> dict[str, str]:
    return model_settings(SimpleNamespace(to_dict=lambda: values))


def test_settings_are_named_with_those_that_they_are_in() -> None:
    found = settings(rope_theta=1e4, rope_scaling={"factor": 2, "type": "yarn"}, _name_or_path="/here")
    assert found == {"rope_theta": "10000.0", "rope_scaling.factor": "2", "rope_scaling.type": '"yarn"'}


def test_a_long_one_is_distinguished_by_its_end() -> None:
    one, other = settings(ids=list(range(200))), settings(ids=[*range(199), 0])
    assert one != other
    assert all(len(text) < LETTERS + 30 for text in (*one.values(), *other.values()))


def test_one_with_much_within_it_is_one_setting() -> None:
    labels = {str(number): f"label {number}" for number in range(MOST_WITHIN + 1)}
    found = settings(id2label=labels, layers=2)
    assert found.keys() == {"id2label", "layers"}
    assert found != settings(id2label=labels | {"0": "another"}, layers=2)


def rank(**values: Any) -> RankInfo:
    return RankInfo("p", b"e" * 16, 0, 1, 16, 8, "127.0.0.1:1", settings=settings(**values))


def test_decode_refuses_a_prefill_server_with_another_rope_by_its_name() -> None:
    ours = Local(0, 1, 16, 8, settings=settings(rope_theta=1e4, layers=2))
    require_fit([rank(rope_theta=1e4, layers=2)], ours)
    with pytest.raises(RefusedError, match=r"rope_theta \(500000\.0 there, 10000\.0 here\)") as refused:
        require_fit([rank(rope_theta=5e5, layers=2)], ours)
    assert "--json-model-override-args" in str(refused.value)


def test_settings_travel_and_are_bounded() -> None:
    message = Register(rank(rope_theta=1e4))
    assert MESSAGES.requests.decode(MESSAGES.requests.encode(message)) == message
    many = Register(rank(**{f"s{number}": number for number in range(1025)}))
    with pytest.raises(WireError):
        MESSAGES.requests.decode(MESSAGES.requests.encode(many))
