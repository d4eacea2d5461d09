"""Errors of a transfer, by the party that must act.

Every error ends one transfer, never the process. The code that catches one treats the blocks as absent and
computes them again (a cache fault is a miss); the class only decides the counter and whether the peer stays
connected.
"""

from __future__ import annotations

from sglang_ext import errors


class TransferError(errors.SglangExtError):
    """Base of everything that ends a transfer."""


class RangeError(TransferError, errors.UserError):
    """The caller asked for bytes outside a registered region, or for block lists that do not match."""

    actor = errors.Actor.USER


class RefusedError(TransferError, errors.PeerError):
    """The peer will not connect or publish; `reason` is one word, the text names the difference.

    again_s: seconds after which unpublished blocks are expected to be published; 0 where nothing is known.
    """

    actor = errors.Actor.PEER

    def __init__(self, reason: str, text: str, again_s: float = 0.0) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason
        self.again_s = again_s


class TransportUnavailableError(TransferError, errors.PeerError):
    """No transport reaches the peer, or not this one. The text gives the reason of each that was tried."""

    actor = errors.Actor.PEER


class PeerProtocolError(TransferError, errors.PeerError):
    """The peer sent something that is not the protocol. We disconnect."""

    actor = errors.Actor.PEER


class PeerGoneError(TransferError, errors.PeerError):
    """The peer died, restarted (another epoch) or cut the connection."""

    actor = errors.Actor.PEER


class SessionEndedError(PeerGoneError):
    """The peer lives and has ended our session, as we were silent for too long: connect again."""


class StaleReadError(TransferError, errors.PeerError):
    """The owner changed a block while it was read, or before. The bytes must be discarded."""

    actor = errors.Actor.PEER

    def __init__(self, request: str, stale: int, blocks: int) -> None:
        super().__init__(f"request {request!r}: {stale} of {blocks} blocks have another generation now")
        self.request = request
        self.stale = stale


class TransferDeadlineError(TransferError, errors.DeadlineError):
    """The transfer did not end in time. Nothing writes to its local ranges any more."""

    actor = errors.Actor.DEADLINE


class CancelledTransferError(TransferError):
    """We cancelled the transfer; nothing writes to its local ranges any more."""
