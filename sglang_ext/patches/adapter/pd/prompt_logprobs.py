"""Log probabilities of a prompt, out of a request on prefill and into the same request on decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from sglang_ext.engine.pd.prompt_logprobs import (
    PromptLogprobs,
    Rows,
    pack_rows,
    unpack_row,
    unpack_rows,
)

_BROUGHT: Final = "sglang_ext_prompt_logprobs"
"""Attribute of a request on decode whose prompt's log probabilities have come from prefill."""


def of_request(req: Any) -> PromptLogprobs | None:
    """The log probabilities that a request asks for of its prompt, and of the first token for
    ``token_ids_logprob``; None where it asks for none. Its last chunk is computed."""
    found = req.logprob
    if not req.return_logprob or (found.input_token_logprobs_val is None and found.token_ids_logprob is None):
        return None
    flat = found.input_top_logprobs_val_flat
    return PromptLogprobs(
        tokens=_row(found.input_token_logprobs_val, found.input_token_logprobs_idx),
        top=_rows(found.input_top_logprobs_val, found.input_top_logprobs_idx),
        flat=None if flat is None else _rows(flat, found.input_top_logprobs_idx_flat),
        null_prefix=found.input_top_logprobs_flat_null_prefix or 0,
        chosen=_rows(found.input_token_ids_logprobs_val, found.input_token_ids_logprobs_idx),
        first=_row(
            next(iter(found.output_token_ids_logprobs_val or ()), None),
            next(iter(found.output_token_ids_logprobs_idx or ()), None),
        ),
    )


def commit(stock: Callable[[Any, Any], Any], queue: Any, decode_req: Any) -> Any:
    """Decode takes over prefill's results for a request: its first token, and the log probabilities of its
    prompt that it asks for."""
    req, brought = decode_req.req, getattr(decode_req.kv_receiver, "prompt_logprobs", None)
    if brought is None:
        return stock(queue, decode_req)
    found = req.logprob
    before, rows = len(found.output_token_logprobs_val or ()), len(found.output_token_ids_logprobs_val or ())
    result = stock(queue, decode_req)
    fill(req, brought)
    is_committed = len(found.output_token_logprobs_val or ()) > before
    if is_committed and brought.first is not None and found.token_ids_logprob is not None:
        # From 0.5.23 on, SGLang has appended an empty row, which this one replaces.
        values, ids = unpack_row(brought.first)
        found.output_token_ids_logprobs_val[rows:] = [values]
        found.output_token_ids_logprobs_idx[rows:] = [ids]
    return result


def fill(req: Any, brought: PromptLogprobs) -> None:
    """Give a request the log probabilities of its prompt."""
    found = req.logprob
    if brought.tokens is not None:
        found.input_token_logprobs_val, found.input_token_logprobs_idx = unpack_row(brought.tokens)
    if brought.top is not None:
        found.input_top_logprobs_val, found.input_top_logprobs_idx = unpack_rows(brought.top)
    if brought.flat is not None:
        values, ids = unpack_rows(brought.flat)
        found.input_top_logprobs_val_flat = np.asarray(values, np.float32)
        found.input_top_logprobs_idx_flat = np.asarray(ids, np.int32)
        found.input_top_logprobs_flat_null_prefix = brought.null_prefix
    if brought.chosen is not None:
        found.input_token_ids_logprobs_val, found.input_token_ids_logprobs_idx = unpack_rows(brought.chosen)
    setattr(req, _BROUGHT, brought.tokens is not None)


def are_due(req: Any) -> bool:
    """Whether a request on decode has log probabilities of its prompt that its client has not."""
    return bool(getattr(req, _BROUGHT, False)) and not req.input_logprob_sent


def _row(values: Any, ids: Any) -> Rows | None:
    return None if values is None or ids is None else _rows([values], [ids])


def _rows(values: Sequence[Any] | None, ids: Sequence[Any] | None) -> Rows | None:
    if values is None or ids is None:
        return None
    return pack_rows([_plain(row) for row in values], [_plain(row) for row in ids])


def _plain(row: Any) -> Any:
    """A row that SGLang may have left in a tensor or an array."""
    return row.tolist() if hasattr(row, "tolist") else row
