"""Log probabilities of a prompt: prefill computes them, and sends them to decode with `Ready`.

SGLang leaves it to its own router to take them from prefill's answer. Here decode's answer has them, for each
API and each router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np

from sglang_ext.wire import Blob, WireError

MAX_BYTES: Final = 8 << 20
"""Of a request. A control message has at most 16 MiB, and a part of it 8 MiB."""
NO_ROW: Final = -1

Values = Sequence[Sequence[float | None] | None]
Ids = Sequence[Sequence[int] | None]


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens and their log probabilities, some for each position.

    lengths: of the rows, as int32; `NO_ROW` where a position has none. values: of all rows, as float32, NaN
    for none. ids: the tokens, as int32.
    """

    lengths: Blob
    values: Blob
    ids: Blob

    @property
    def nbytes(self) -> int:
        return len(self.lengths) + len(self.values) + len(self.ids)


class PromptLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one request.

    tokens: the prompt's own tokens from ``logprob_start_len`` on, in one row. top: the likeliest tokens of
    each position (``top_logprobs_num``). flat: the same in SGLang's flat form, in rows of one length after
    `null_prefix` positions without. chosen: the tokens of ``token_ids_logprob`` at each position; first:
    those of the first token of the answer, in one row.
    """

    tokens: Rows | None = None
    top: Rows | None = None
    flat: Rows | None = None
    null_prefix: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    chosen: Rows | None = None
    first: Rows | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.tokens, self.top, self.flat, self.chosen, self.first)
        return sum(part.nbytes for part in parts if part is not None)


def pack_rows(values: Values, ids: Ids) -> Rows:
    """Encode rows for a message. A row and its ids are equally long, or both None."""
    lengths = [NO_ROW if row is None else len(row) for row in values]
    flat_values = [np.nan if value is None else value for row in values for value in row or ()]
    flat_ids = [token for row in ids for token in row or ()]
    if len(flat_values) != len(flat_ids):
        raise ValueError(f"{len(flat_values)} log probabilities of {len(flat_ids)} tokens")
    return Rows(
        np.asarray(lengths, "<i4").tobytes(),
        np.asarray(flat_values, "<f4").tobytes(),
        np.asarray(flat_ids, "<i4").tobytes(),
    )


def unpack_rows(rows: Rows) -> tuple[list[list[float | None] | None], list[list[int] | None]]:
    """The rows of `pack_rows`, values and ids.

    Raises:
        WireError: the parts do not fit together.
    """
    if len(rows.lengths) % 4 or len(rows.values) % 4 or len(rows.values) != len(rows.ids):
        raise WireError("log probabilities whose parts do not fit together")
    lengths = np.frombuffer(rows.lengths, "<i4").tolist()
    if any(length < NO_ROW for length in lengths) or sum(max(n, 0) for n in lengths) * 4 != len(rows.values):
        raise WireError("log probabilities whose rows do not fit together")
    flat_values = [None if value != value else value for value in np.frombuffer(rows.values, "<f4").tolist()]
    flat_ids = np.frombuffer(rows.ids, "<i4").tolist()
    values: list[list[float | None] | None] = []
    ids: list[list[int] | None] = []
    start = 0
    for length in lengths:
        end = start + max(length, 0)
        values.append(None if length == NO_ROW else flat_values[start:end])
        ids.append(None if length == NO_ROW else flat_ids[start:end])
        start = end
    return values, ids


def unpack_row(rows: Rows) -> tuple[list[float | None], list[int]]:
    """The only row of `rows`.

    Raises:
        WireError: there are several rows, or none.
    """
    values, ids = unpack_rows(rows)
    if len(values) != 1 or values[0] is None or ids[0] is None:
        raise WireError("log probabilities of one row have another number of rows")
    return values[0], ids[0]


def bytes_for(positions: int, top: int, chosen: int) -> int:
    """The largest size of a prompt's log probabilities, encoded.

    Args:
        positions: of the prompt, from ``logprob_start_len`` on.
        top, chosen: tokens at each of them, the likeliest and those of ``token_ids_logprob``.
    """
    return 4 + sum(positions * (4 + 8 * tokens) for tokens in (top, chosen) if tokens) + 8 * positions


def too_large(nbytes: int) -> str:
    """The error text for a request whose log probabilities are above `MAX_BYTES`."""
    return (
        f"the log probabilities of the prompt take {nbytes} bytes, and prefill hands over at most "
        f"{MAX_BYTES}: raise logprob_start_len, lower top_logprobs_num, or name fewer token_ids_logprob"
    )


def require_sound(logprobs: PromptLogprobs) -> None:
    """Raises:
    WireError: the peer's log probabilities cannot be unpacked.
    """
    for row in (logprobs.tokens, logprobs.first):
        if row is not None:
            unpack_row(row)
    for rows in (logprobs.top, logprobs.chosen):
        if rows is not None:
            unpack_rows(rows)
    if logprobs.flat is not None:
        values, _ = unpack_rows(logprobs.flat)
        if len({NO_ROW if row is None else len(row) for row in values} | {NO_ROW}) > 2 or None in values:
            raise WireError("log probabilities in flat form have rows of several lengths")
