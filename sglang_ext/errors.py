"""Errors, sorted by who must act.

Every error that leaves a part of this package is one of the five below, so that its handler can decide
what to do without reading the text: tell the user, report a bug, try another peer, look at the
medium, or give up because time is over. The text names the flag or field and the way out.
"""

from __future__ import annotations

import enum


class Actor(enum.Enum):
    """The party that can make the failing call succeed."""

    USER = "user"
    """The caller: the request or the flag is wrong, and repeating it will not help."""
    US = "us"
    """The authors: an invariant of this package was broken."""
    PEER = "peer"
    """Another process: it refused, died or talks another version. Another peer may do."""
    MEDIUM = "medium"
    """Disk, memory or network hardware: disk full, read error, memory gone, checksum wrong."""
    DEADLINE = "deadline"
    """No party: the time allowed for the call is over."""


class SglangExtError(Exception):
    """Base of every error of this package. Raise one of its children.

    Args:
        message: describes the fault, in a sentence without a full stop.
        field: the flag (``--kv-dram-size``) or request field (``input_ids[3]``) it is about.
        hint: the way out, a sentence of its own.
    """

    actor: Actor = Actor.US

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        self.message = message
        self.field = field
        self.hint = hint
        text = message if field is None or field in message else f"{field}: {message}"
        super().__init__(text if hint is None else f"{text}. {hint}")


class UserError(SglangExtError):
    """The caller must change the request."""

    actor = Actor.USER


class ConfigError(UserError):
    """A flag or a configuration field has a value that cannot work; ``field`` names it."""


class InternalError(SglangExtError):
    """A bug of ours: an invariant does not hold."""

    actor = Actor.US


class OutOfStepError(InternalError):
    """The ranks of an instance have taken different decisions, and would answer wrongly from here on."""


class PeerError(SglangExtError):
    """Another process failed, or refused, or cannot be reached."""

    actor = Actor.PEER


class MediumError(SglangExtError):
    """Disk, memory or network hardware failed to keep the bytes that it was given."""

    actor = Actor.MEDIUM


class DeadlineError(SglangExtError):
    """The time allowed for a call is over; whether it took effect is unknown."""

    actor = Actor.DEADLINE
