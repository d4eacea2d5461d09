"""The key of a cluster: who has it is a member, on every channel.

One file holds it, the same on every machine of the cluster, readable by its owner only::

    openssl rand -base64 48 > cluster.key && chmod 600 cluster.key

It never travels. HTTP requests between members carry a signature over method, path, body and time; ZeroMQ
channels use a CURVE pair that is derived from it, as ``disagg.control.CurveKeys`` wants one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import Final

from sglang_ext.errors import ConfigError

MIN_CHARACTERS: Final = 32
MAX_BYTES: Final = 4096
SCHEME: Final = "KV-HMAC"
"""The word before the signature in the ``authorization`` header."""
MAX_SKEW_S: Final = 60.0
"""How far the clocks of two members may be apart, and how long a signature can be used again."""


class ClusterKey:
    """A key that was read; shows nothing of itself.

    Args:
        secret: the text of the file, without white space around it.
    """

    def __init__(self, secret: bytes) -> None:
        self._http = _derive(secret, b"http")
        self._curve = _derive(secret, b"curve")

    def __repr__(self) -> str:
        return "<ClusterKey>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterKey) and hmac.compare_digest(self._http, other._http)

    def __hash__(self) -> int:
        return hash(self._http)

    def curve_pair(self) -> tuple[bytes, bytes]:
        """(public, secret) in Z85, 40 characters each: what every member uses on ZeroMQ."""
        import zmq
        from zmq.utils import z85

        secret: bytes = z85.encode(self._curve)
        public: bytes = zmq.curve_public(secret)
        return public, secret

    def sign(self, method: str, target: str, body: bytes, wall: float) -> str:
        """The ``authorization`` header of a request.

        target: path and query as in the request line. wall: seconds since the epoch, now.
        """
        moment = str(int(wall * 1000))
        return f"{SCHEME} {moment}.{self._signature(method, target, body, moment)}"

    def problem(self, header: str, method: str, target: str, body: bytes, wall: float) -> str | None:
        """Why a request with this ``authorization`` header is not a member's; ``None`` when it is one's."""
        scheme, _, value = header.partition(" ")
        moment, _, signature = value.strip().partition(".")
        if scheme.lower() != SCHEME.lower() or not moment.isascii() or not moment.isdigit():
            return "it is not signed with the cluster key (--cluster-key-file, --kv-cluster-key-file)"
        expected = self._signature(method, target, body, moment)
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            return "it is signed with another cluster key"
        skew = int(moment[:18]) / 1000 - wall
        if abs(skew) > MAX_SKEW_S:
            return f"it was signed {abs(skew):.0f} s {'ahead' if skew > 0 else 'ago'}; set the clocks right"
        return None

    def _signature(self, method: str, target: str, body: bytes, moment: str) -> str:
        head = "\n".join((method, target, moment, hashlib.sha256(body).hexdigest()))
        return hmac.new(self._http, head.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=b"sglang_ext" + purpose[:6]).digest()


def read_cluster_key(path: str | Path, *, field: str = "--cluster-key-file") -> ClusterKey:
    """Read the key of the cluster.

    Args:
        field: the flag by which ``path`` was given, for errors.

    Raises:
        ConfigError: there is no such file, others could read or write it, or it holds no key.
    """
    hint = f"Make one: openssl rand -base64 48 > {path} && chmod 600 {path}"
    secret = read_secret(path, field=field, hint=hint)
    if len(secret) < MIN_CHARACTERS:
        raise ConfigError(
            f"{path} does not hold one line of {MIN_CHARACTERS} to {MAX_BYTES} characters",
            field=field,
            hint=hint,
        )
    if len(set(secret)) < 8:
        raise ConfigError(f"the key in {path} can be guessed", field=field, hint=hint)
    return ClusterKey(secret)


def read_secret(path: str | Path, *, field: str, hint: str | None = None) -> bytes:
    """The one line of a file that nobody else can read, without white space around it.

    Args:
        field: the flag by which ``path`` was given, and hint: the way out, for errors.

    Raises:
        ConfigError: there is no such file, others could read or write it, or it is empty or too long.
    """
    try:
        # Looked at and read by one descriptor: nobody can exchange the file in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field=field, hint=hint) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a file", field=field, hint=hint)
        if status.st_mode & 0o077:
            raise ConfigError(
                f"others can use {path} (mode {stat.S_IMODE(status.st_mode):04o})",
                field=field,
                hint=f"chmod 600 {path}, and change what is in it if they may have read it",
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{path} belongs to another user", field=field, hint=hint)
        secret = os.read(descriptor, MAX_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if not secret or len(secret) > MAX_BYTES or b"\n" in secret:
        raise ConfigError(
            f"{path} does not hold one line of at most {MAX_BYTES} characters", field=field, hint=hint
        )
    return secret
