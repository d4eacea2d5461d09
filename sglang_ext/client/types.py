"""The JSON of a router's answers. Routers may add keys; a key that a router leaves out is absent."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class Hint(TypedDict, total=False):
    """A hint's state. Tokens are the prompt's; seconds count from now.

    verdict: in the answer to a new hint only. tokens: by tier, as the instance has them. moved_tokens,
    computed_tokens: brought to HBM, and computed ahead.
    """

    id: str
    verdict: Literal["accepted", "clipped", "deferred"]
    state: str
    why: str | None
    instance: str | None
    decode: str | None
    session: bool
    tokens: dict[str, int]
    moved_tokens: int
    decode_moved_tokens: int | None
    computed_tokens: int
    earliest_in_s: float
    expires_in_s: float
    ready_after_s: float | None


class Document(TypedDict, total=False):
    """A registered document.

    tokens: None where they are not known. instances: by name, whether its KV is held back there
    (``held_back``), and its ``tokens`` by tier.
    """

    id: str
    kind: Literal["text", "input_ids", "messages"]
    tokens: int | None
    blocks: int
    expires_in_s: float
    requests: int
    why_not_held_back: str | None
    instances: dict[str, dict[str, Any]]


class Divergence(TypedDict, total=False):
    """Where a turn left the tokens of its session's last turn.

    at: its first token that differs. before, after: the words there, for the key that sent the request. text:
    all of it in a sentence.
    """

    at: int
    cause: str
    lost_tokens: int
    rule: str | None
    before: str
    after: str
    text: str


class Explanation(TypedDict, total=False):
    """Why a request hit or missed. durability: as in ``Confirmation.end``."""

    request_id: str
    answer_id: str | None
    endpoint: str
    tenant: str | None
    status: int
    causes: list[str]
    prompt: dict[str, Any]
    divergence: Divergence | None
    repairs: list[dict[str, Any]]
    cached: dict[str, Any]
    documents: dict[str, Any] | None
    durability: str | None
    routing: list[dict[str, Any]]
    evictions: list[dict[str, Any]] | None
    spilled: list[dict[str, Any]]
    seconds: dict[str, Any]
    error: str | None
