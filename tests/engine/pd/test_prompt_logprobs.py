"""Log probabilities of a prompt on their way from prefill to decode, and refused values of a peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.engine.pd.messages import MESSAGES, Ready
from sglang_ext.engine.pd.prompt_logprobs import (
    NO_ROW,
    PromptLogprobs,
    Rows,
    bytes_for,
    pack_rows,
    require_sound,
    too_large,
    unpack_row,
    unpack_rows,
)
from sglang_ext.patches.adapter.pd.prompt_logprobs import are_due, commit, of_request
from sglang_ext.wire import WireError

VALUES = st.none() | st.floats(-100, 0, width=32)
TOKENS = st.integers(0, 2**31 - 1)
ROWS = st.lists(st.none() | st.lists(st.tuples(VALUES, TOKENS), max_size=5), max_size=9)


def int32(*numbers: int) -> bytes:
    return np.asarray(numbers, "<i4").tobytes()


@given(ROWS)
def test_rows_come_back_as_they_were(rows: list[list[tuple[float | None, int]] | None]) -> None:
    values = [None if row is None else [value for value, _ in row] for row in rows]
    ids = [None if row is None else [token for _, token in row] for row in rows]
    packed = pack_rows(values, ids)
    assert unpack_rows(packed) == (values, ids)
    ready = Ready((), b"row", logprobs=PromptLogprobs(top=packed))
    assert MESSAGES.replies.decode(MESSAGES.replies.encode(ready)) == ready


@pytest.mark.parametrize(
    "rows",
    [
        Rows(b"123", b"", b""),
        Rows(int32(1), b"1234", b""),
        Rows(int32(2), int32(0), int32(0)),
        Rows(int32(-2), b"", b""),
        Rows(int32(1, NO_ROW, 1), int32(0), int32(0)),
    ],
)
def test_what_does_not_fit_together_is_refused(rows: Rows) -> None:
    for each in (PromptLogprobs(top=rows), PromptLogprobs(tokens=rows), PromptLogprobs(flat=rows)):
        with pytest.raises(WireError):
            require_sound(each)


def test_one_row_is_one() -> None:
    rows = pack_rows([[-1.0], [-2.0]], [[1], [2]])
    require_sound(PromptLogprobs(top=rows, chosen=rows, flat=rows))
    with pytest.raises(WireError, match="one row"):
        unpack_row(rows)
    with pytest.raises(WireError, match="several lengths"):
        require_sound(PromptLogprobs(flat=pack_rows([[-1.0], []], [[1], []])))


def request(**logprob: Any) -> SimpleNamespace:
    names = [
        f"{part}_{kind}"
        for part in ("input", "output")
        for kind in (
            *("token_logprobs_val", "token_logprobs_idx", "top_logprobs_val", "top_logprobs_idx"),
            *("token_ids_logprobs_val", "token_ids_logprobs_idx", "top_logprobs_val_flat"),
            *("top_logprobs_idx_flat", "top_logprobs_flat_null_prefix"),
        )
    ]
    fields = dict.fromkeys([*names, "token_ids_logprob"]) | logprob
    return SimpleNamespace(return_logprob=True, input_logprob_sent=False, logprob=SimpleNamespace(**fields))


@pytest.mark.parametrize("reserves", [False, True])
def test_decode_answers_with_what_prefill_computed(reserves: bool) -> None:
    """From 0.5.23 on, SGLang's commit reserves an empty row for the first token's chosen ids."""
    prefill = request(
        input_token_logprobs_val=[None, -1.5],
        input_token_logprobs_idx=[4, 5],
        input_top_logprobs_val=[],
        input_top_logprobs_idx=[],
        input_top_logprobs_val_flat=np.array([[-0.5, -2.0]], np.float32),
        input_top_logprobs_idx_flat=np.array([[8, 9]], np.int32),
        input_top_logprobs_flat_null_prefix=1,
        token_ids_logprob=[7],
        input_token_ids_logprobs_val=[None, [-3.0]],
        input_token_ids_logprobs_idx=[None, [7]],
        output_token_ids_logprobs_val=[[-4.0], [-5.0]],
        output_token_ids_logprobs_idx=[[7], [7]],
    )
    decode = request(
        token_ids_logprob=[7],
        output_token_logprobs_val=[],
        output_token_ids_logprobs_val=[],
        output_token_ids_logprobs_idx=[],
    )
    receiver = SimpleNamespace(prompt_logprobs=of_request(prefill))

    def stock(_queue: Any, decode_req: Any) -> None:
        decode_req.req.logprob.output_token_logprobs_val.append(-0.25)
        if reserves:
            decode_req.req.logprob.output_token_ids_logprobs_val.append([])
            decode_req.req.logprob.output_token_ids_logprobs_idx.append([])

    commit(stock, None, SimpleNamespace(req=decode, kv_receiver=receiver))
    found, given_ = decode.logprob, prefill.logprob
    assert (found.input_token_logprobs_val, found.input_token_logprobs_idx) == ([None, -1.5], [4, 5])
    assert found.input_top_logprobs_val_flat.tolist() == given_.input_top_logprobs_val_flat.tolist()
    assert found.input_top_logprobs_idx_flat.dtype == np.int32
    assert found.input_top_logprobs_flat_null_prefix == 1
    assert found.input_token_ids_logprobs_val == [None, [-3.0]]
    assert (found.output_token_ids_logprobs_val, found.output_token_ids_logprobs_idx) == ([[-4.0]], [[7]])
    assert are_due(decode)
    decode.input_logprob_sent = True
    assert not are_due(decode)


def test_what_is_not_asked_for_does_not_travel() -> None:
    assert of_request(request()) is None
    silent = request(input_token_logprobs_val=[None], input_token_logprobs_idx=[1])
    silent.return_logprob = False
    assert of_request(silent) is None
    decode = request()
    commit(lambda *_: None, None, SimpleNamespace(req=decode, kv_receiver=SimpleNamespace()))
    assert not are_due(decode)


def test_too_many_are_refused_with_the_fields_that_ask_for_them() -> None:
    error = too_large(9_000_000)
    assert "raise logprob_start_len, lower top_logprobs_num, or name fewer token_ids_logprob" in error


@pytest.mark.parametrize(("top", "chosen"), [(0, 0), (3, 0), (0, 2), (5, 7)])
@pytest.mark.parametrize("positions", [1, 9])
def test_what_they_take_is_known_before_they_are_computed(positions: int, top: int, chosen: int) -> None:
    def rows(tokens: int) -> Rows | None:
        return pack_rows([[-1.0] * tokens] * positions, [[7] * tokens] * positions) if tokens else None

    found = PromptLogprobs(
        tokens=pack_rows([[-1.0] * positions], [[7] * positions]), top=rows(top), chosen=rows(chosen)
    )
    assert found.nbytes == bytes_for(positions, top, chosen)
