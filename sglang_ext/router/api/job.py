"""A checked request: its prompts, and the fields that keep each apart from equal prompts."""

from __future__ import annotations

from array import array

import msgspec

from sglang_ext.router.api.validation import Json


class Chat(msgspec.Struct, frozen=True):
    """A conversation to be rendered by the model's chat template."""

    payload: Json
    in_front: Json | None = None
    """The same with its system messages as one in front, as a server has it whose template does not show them
    in their places. ``None`` where servers leave them there whatever the template does."""
    long_in_place: bool = False
    """Servers of every version leave them where the template shows them, not only from 0.5.22 on."""

    by_parser: bool = False
    """The server's reasoning parser decides in which form the template gets reasoning: `tokens.reasoning`."""

    def seen(self, in_place: bool) -> Json:
        """As a server has it that leaves system messages in their places, or does not."""
        return self.payload if in_place or self.in_front is None else self.in_front


class Pair(msgspec.Struct, frozen=True):
    """A query and a document, of which a server makes one prompt."""

    query: str
    document: str
    instruct: str | None = None
    """The instruction in the prompt: when a document is relevant."""
    by_template: bool = True
    """Render the chat template, where that is a reranker's; else have the tokenizer join the texts."""


class PromptInput(msgspec.Struct, frozen=True):
    """One sequence that has to be prefilled. One of ``ids``, ``text``, ``chat`` and ``pair`` is given."""

    ids: array[int] | None = None
    text: str | None = None
    chat: Chat | None = None
    pair: Pair | None = None
    opaque: bool = False
    """The tokens cannot be known here (images, embeddings): it is matched by its text only."""
    media: str = ""
    """A digest of the images, videos and sounds that come beside it: of the same words about another picture,
    no KV is expected."""
    namespace: tuple[str | None, ...] = ()
    """(adapter, extra_key, cache_salt), which keep it apart from equal prompts."""
    max_new_tokens: int | None = None

    @property
    def salt(self) -> str | None:
        """The ``cache_salt``: the tenant's, or the client's own where there are no tenants."""
        return self.namespace[-1] if self.namespace else None


class Job(msgspec.Struct, frozen=True):
    """A generation request whose fields have been checked."""

    stream: bool
    prompts: tuple[PromptInput, ...]
    choices: int = 1
    batch: bool = False
    """The prompts came as an array, even if of one; a worker then takes an array of names for them."""
    echoes: bool = False
    """The answers repeat their prompts."""
    background: bool = False
    """It is answered at once, and generates afterwards."""
    pinned_to: str | None = None
    """The response that it goes on from, or the ``session_key`` of its session; the instance that keeps it
    must serve it."""


MAX_SESSION_CHARS = 256
"""Of the name of a session of SGLang's; routers send each other all names."""
_SESSION = "session "
"""No response's id has a blank."""


def session_key(name: str) -> str:
    """The name of a SGLang session among the response ids of routers."""
    return _SESSION + name


def session_of_key(key: str) -> str | None:
    """The name of a session; None of a response."""
    return key[len(_SESSION) :] if key.startswith(_SESSION) else None
