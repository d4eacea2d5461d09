"""The facts of an instance, as its server reports them, and the settings that all of a fleet share."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from sglang_ext.cost_model import Batching
from sglang_ext.cost_model.batch import ANY
from sglang_ext.router.api.limits import Limits, ModelKind

DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's default, for servers that do not report theirs."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the model, equal for all instances of a fleet."""

    name: str
    """``served_model_name``."""
    architecture: str
    vocab_size: int
    """Token ids at or above it kill a stock SGLang scheduler."""
    context_length: int
    kind: ModelKind = ModelKind.GENERATES

    def difference(self, other: ModelFacts) -> str | None:
        """The first field in which ``other`` differs, with both values; ``None`` when they agree."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not theirs and name == "kind":
                return f"it {theirs.value}, and this fleet's model {mine.value}"
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        return None


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """Server settings that change how SGLang turns messages into tokens."""

    chat_template: str | None = None
    completion_template: str | None = None
    hf_chat_template_name: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    default_template_kwargs: tuple[tuple[str, object], ...] = ()
    multimodal: bool = False
    tools_as_given: bool = False
    """Templates see a tool's fields in the client's order, and ``strict`` only where it is given."""
    system_in_place: bool = False
    """System messages of ``/v1/responses`` stay where they are, with a template that shows them there."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a stock server publishes its KV events: addresses that can be connected to."""

    endpoint: str
    replay: str | None = None
    """Where batches are sent again that were missed."""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """The facts of an instance, read when it is first reached, and whenever it comes back."""

    model: ModelFacts
    weight_version: str
    identity: str
    """Differs between two starts of the same server, to distinguish a restart from a lost connection."""
    role: str
    tokenizer_path: str
    truncates: bool = False
    """``--allow-auto-truncate``: too long prompts are cut instead of refused."""
    bootstrap_port: int | None = None
    """Of a prefill server: where decode servers ask it for KV."""
    reports: bool = False
    """It was started with ``--kv-router``: it will register, and send placement events."""
    events: EventSource | None = None
    """It was started with ``--kv-events-config``, in a way that can be followed."""
    changes_role: bool = False
    """It was started with ``--enable-pd-role-switch``: it can change between prefill and decode."""
    chat: ChatFacts = ChatFacts()
    batching: Batching = ANY
    """How it fills its forward passes."""
    obstacle: str = ""
    """Why ordinary requests would end it, with the way out; empty where they do not."""

    @property
    def limits(self) -> Limits:
        """The limits for checking requests."""
        model = self.model
        return Limits(model.vocab_size, model.context_length, self.truncates, model.name)


def bootstrap_of(url: str, facts: InstanceFacts | None) -> tuple[str, int]:
    """Host and port at which decode asks the prefill instance at ``url`` for KV."""
    port = facts.bootstrap_port if facts is not None else None
    return urlsplit(url).hostname or "", port or DEFAULT_BOOTSTRAP_PORT
