"""The key of a cluster: a process that has it is a member, on every channel.

One file holds it, the same on every machine of the cluster, readable by its owner only::

    openssl rand -base64 48 > cluster.key && chmod 600 cluster.key

It never travels. HTTP requests between members carry a signature over method, path, body, time and a nonce;
records in Redis carry one too; ZeroMQ channels use a CURVE pair that is derived from it, as
``MemberKeys`` of the control plane has it.

To change it, members have to accept two for a while. The file may hold a second line: the first key signs,
both are accepted. It is read again when it has changed, so that no member has to be started anew:

    old          old, new          new, old          new
    everywhere   everywhere, then  everywhere, then  everywhere
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from sglang_ext.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_CHARACTERS: Final = 32
MAX_BYTES: Final = 4096
MAX_KEYS: Final = 2
"""Keys in a file: the first one signs, a second one is accepted as well."""
SCHEME: Final = "KV-HMAC"
"""The word before the signature in the ``authorization`` header."""
MAX_SKEW_S: Final = 60.0
"""The most by which a signature's time may differ from the verifier's clock, which keeps its nonce as
long.
"""
CLOCK_HEADER: Final = "kv-clock"
"""Tells a member whose signature is refused what time it is here; it signs again by that."""
NONCE_BYTES: Final = 16
LOOK_S: Final = 1.0
"""Pause between two looks at whether the file has changed."""
NO_SEAL: Final = "-"
"""In place of a seal where there is no key."""


class _Secret:
    """Secrets derived from one key."""

    def __init__(self, secret: bytes) -> None:
        self.http = _derive(secret, b"http")
        self.seal = _derive(secret, b"seal")
        self.curve = _derive(secret, b"curve")
        self._pair: tuple[bytes, bytes] | None = None

    def signature(self, method: str, target: str, body: bytes, moment: str, nonce: str) -> str:
        head = "\n".join((method, target, moment, nonce, hashlib.sha256(body).hexdigest()))
        return hmac.new(self.http, head.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()

    def sealed(self, purpose: str, data: bytes) -> str:
        return hmac.new(self.seal, purpose.encode() + b"\n" + data, hashlib.sha256).hexdigest()

    def curve_pair(self) -> tuple[bytes, bytes]:
        if self._pair is None:
            import zmq
            from zmq.utils import z85

            secret: bytes = z85.encode(self.curve)
            self._pair = (zmq.curve_public(secret), secret)
        return self._pair


class ClusterKey:
    """A key that was read; shows nothing of itself. For any thread.

    Args:
        keys: the text of each key. The first one signs, all are accepted. again: reads them again; ``None``
        while nothing has changed. When it raises, the keys stay. now: seconds, monotonic. looks: whether each
        use checks the file for a newer key. Otherwise the owner calls ``look``, from where
            it may wait for a disk.
    """

    def __init__(
        self,
        *keys: bytes,
        again: Callable[[], Sequence[bytes] | None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        looks: bool = True,
    ) -> None:
        self._secrets = tuple(map(_Secret, keys))
        self._again = again
        self._now = now
        self._look_at = now() + LOOK_S if looks else math.inf
        self._looking = threading.Lock()

    def __repr__(self) -> str:
        return "<ClusterKey>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterKey) and hmac.compare_digest(
            self._secrets[0].http, other._secrets[0].http
        )

    def _current(self) -> tuple[_Secret, ...]:
        """The keys, as the file has them now."""
        if self._now() >= self._look_at:
            self._look_at = self._now() + LOOK_S
            self.look()
        return self._secrets

    def look(self) -> None:
        """Read the file again if it has changed, unless another thread does."""
        if self._looking.acquire(blocking=False):
            try:
                if (keys := self._again()) is not None:
                    self._secrets = tuple(map(_Secret, keys))
                    logger.info("the key of the cluster was read again: %d accepted", len(keys))
            except ConfigError as error:
                logger.error("the key of the cluster stays as it was: %s", error)
            finally:
                self._looking.release()

    def curve_pair(self) -> tuple[bytes, bytes]:
        """(public, secret) in Z85, 40 characters each: this member's key pair on ZeroMQ."""
        return self._current()[0].curve_pair()

    def curve_pairs(self) -> tuple[tuple[bytes, bytes], ...]:
        """The pairs of all keys that are accepted; members use the first."""
        return tuple(each.curve_pair() for each in self._current())

    def is_member(self, public: bytes) -> bool:
        """Whether a public key (Z85) on a ZeroMQ channel is a member's."""
        return any(each.curve_pair()[0] == public for each in self._current())

    def sign(self, method: str, target: str, body: bytes, wall: float) -> str:
        """The ``authorization`` header of one request; the next one needs another.

        target: path and query as in the request line. wall: seconds since the epoch, now.
        """
        moment, nonce = str(int(wall * 1000)), secrets.token_hex(NONCE_BYTES)
        return (
            f"{SCHEME} {moment}.{nonce}.{self._current()[0].signature(method, target, body, moment, nonce)}"
        )

    def problem(
        self, header: str, method: str, target: str, body: bytes, wall: float, since: float = 0.0
    ) -> str | None:
        """Why a request with this ``authorization`` header is not a member's; ``None`` when it is one's. The
        same header is good for as long as its time: ``Replays`` tells whether it was used before. The body is
        hashed only where the rest is in order.

        wall: seconds since the epoch, now. since: from when on signatures are accepted.
        """
        scheme, _, value = header.partition(" ")
        moment, _, rest = value.strip().partition(".")
        nonce, _, signature = rest.partition(".")
        good = moment.isascii() and moment.isdigit() and len(nonce) == 2 * NONCE_BYTES
        if scheme.lower() != SCHEME.lower() or not good:
            return "it is not signed with the cluster key (--cluster-key-file, --kv-cluster-key-file)"
        skew = int(moment[:18]) / 1000 - wall
        if abs(skew) > MAX_SKEW_S:
            return f"it was signed {abs(skew):.0f} s {'ahead' if skew > 0 else 'ago'}; set the clocks right"
        if int(moment[:18]) < int(since * 1000):
            return "it was signed before this router began; sign it again"
        given = signature.encode("utf-8", "surrogateescape")
        expected = [each.signature(method, target, body, moment, nonce) for each in self._current()]
        if not any(hmac.compare_digest(given, each.encode()) for each in expected):
            return "it is signed with another cluster key"
        return None

    def clock(self, header: str, wall: float) -> str:
        """The header that answers a request with a refused signature: the time here, sealed for that request
        only. wall: seconds since the epoch, now. Empty for a request that is not signed.
        """
        nonce = _nonce(header)
        moment = str(int(wall * 1000))
        return f"{moment}.{self.seal(CLOCK_HEADER, f'{nonce}.{moment}'.encode())}" if nonce else ""

    def ahead(self, answer: str, header: str, wall: float) -> float | None:
        """By how many seconds the clock of a member that answered a request is ahead; None when it was none.

        Args:
            answer: the header ``CLOCK_HEADER``. header: by which the request was signed.
            wall: seconds since the epoch, now.
        """
        moment, _, seal = answer.partition(".")
        is_good = moment.isascii() and moment.isdigit() and len(moment) < 18
        if not is_good or not self.is_sealed(CLOCK_HEADER, f"{_nonce(header)}.{moment}".encode(), seal):
            return None
        return int(moment) / 1000 - wall

    def seal(self, purpose: str, data: bytes) -> str:
        """A signature, 64 hexadecimal digits, of data stored where others can write.

        purpose: names the data's kind and place, so that the signature is valid nowhere else.
        """
        return self._current()[0].sealed(purpose, data)

    def is_sealed(self, purpose: str, data: bytes, seal: str) -> bool:
        """Whether a member has written it."""
        given = seal.encode("utf-8", "surrogateescape")
        return any(
            hmac.compare_digest(given, each.sealed(purpose, data).encode()) for each in self._current()
        )


def _nonce(header: str) -> str:
    """Of a signed request."""
    nonce = header.partition(" ")[2].strip().partition(".")[2].partition(".")[0]
    return nonce if len(nonce) == 2 * NONCE_BYTES and nonce.isalnum() else ""


def signed_part(header: str) -> str:
    """The part of an ``authorization`` header that identifies a signature. The scheme's case and the blanks
    around it can differ between copies of one header."""
    return header.partition(" ")[2].strip()


class Replays:
    """Signatures that were used: each is valid once.

    Only valid signatures of members are remembered, and only until they expire.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._tidy_at = 0.0

    def knows(self, header: str) -> bool:
        """Whether a header was seen before."""
        return signed_part(header) in self._until

    def is_again(self, header: str, wall: float) -> bool:
        """Whether a header that ``ClusterKey.problem`` found good was seen before. wall: seconds, now."""
        signed = signed_part(header)
        again = signed in self._until
        self.learn(signed, wall)
        return again

    def learn(self, signed: str, wall: float) -> None:
        """A signature was used at ``wall``, seconds."""
        if wall >= self._tidy_at:
            self._until = {each: until for each, until in self._until.items() if until > wall}
            self._tidy_at = wall + MAX_SKEW_S
        self._until[signed] = wall + 2 * MAX_SKEW_S

    def used(self) -> Iterator[tuple[str, float]]:
        """(signature, when it was used) of all that are remembered."""
        for signed, until in self._until.items():
            yield signed, until - 2 * MAX_SKEW_S

    def __repr__(self) -> str:
        return f"Replays({len(self._until)})"


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=b"sglang_ext" + purpose[:6]).digest()


def read_cluster_key(
    path: str | Path,
    *,
    field: str = "--cluster-key-file",
    now: Callable[[], float] = time.monotonic,
    looks: bool = True,
) -> ClusterKey:
    """Read the key of the cluster, and again whenever its file has changed.

    Args:
        field: the flag by which ``path`` was given, for errors.
        now, looks: see ``ClusterKey``.

    Raises:
        ConfigError: there is no such file, others could read or write it, or it holds no key.
    """
    seen = _mark(path)

    def again() -> tuple[bytes, ...] | None:
        nonlocal seen
        mark = _mark(path)
        if mark == seen:
            return None
        seen = mark
        return _keys(path, field)

    return ClusterKey(*_keys(path, field), again=again, now=now, looks=looks)


def _mark(path: str | Path) -> tuple[int, ...]:
    """Facts of a file of which at least one changes when it is written or replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)


def _keys(path: str | Path, field: str) -> tuple[bytes, ...]:
    hint = f"Make one: openssl rand -base64 48 > {path} && chmod 600 {path}"
    keys = read_secrets(path, MAX_KEYS, field=field, hint=hint)
    for key in keys:
        if len(key) < MIN_CHARACTERS:
            raise ConfigError(
                f"{path} does not hold a line of {MIN_CHARACTERS} to {MAX_BYTES} characters",
                field=field,
                hint=hint,
            )
        if len(set(key)) < 8:
            raise ConfigError(f"the key in {path} can be guessed", field=field, hint=hint)
    return keys


def shared_with(status: os.stat_result, user: int, groups: Collection[int]) -> str | None:
    """Why the content of a file is no secret, as the rest of a sentence; None when it is one.

    The file must belong to this user or to root, and no other user may access it, with one exception: a file
    of root may be readable by a group of this process other than root's own. Kubernetes mounts Secrets that
    way for pods with ``fsGroup``.

    Args:
        user, groups: of this process.
    """
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_uid not in (user, 0):
        return f"belongs to another user ({status.st_uid})"
    others = status.st_mode & 0o077
    group = status.st_gid
    if others and not (others == 0o040 and status.st_uid == 0 and group != 0 and group in groups):
        return f"can be used by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def read_secret(path: str | Path, *, field: str, hint: str | None = None) -> bytes:
    """The one line of a file that no other user can read, without white space around it.

    Raises:
        ConfigError: as ``read_secrets``.
    """
    return read_secrets(path, 1, field=field, hint=hint)[0]


def read_secrets(path: str | Path, most: int, *, field: str, hint: str | None = None) -> tuple[bytes, ...]:
    """The lines of a file that no other user can read, without white space around them.

    Args:
        most: lines that it may have.
        field: the flag by which ``path`` was given, and hint: the way out, for errors.

    Raises:
        ConfigError: there is no such file, others could read or write it, or it is empty or too long.
    """
    try:
        # Checked and read by one descriptor, so that the file cannot be exchanged in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field=field, hint=hint) from None
    try:
        status = os.fstat(descriptor)
        if (problem := shared_with(status, os.geteuid(), {os.getegid(), *os.getgroups()})) is not None:
            raise ConfigError(
                f"{path} {problem}",
                field=field,
                hint=f"chmod 600 {path}, and change what is in it if others may have read it",
            )
        secret = os.read(descriptor, MAX_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    lines = tuple(line.strip() for line in secret.split(b"\n")) if secret else ()
    if not 0 < len(lines) <= most or len(secret) > MAX_BYTES or not all(lines):
        count = "one line" if most == 1 else f"one to {most} lines"
        raise ConfigError(
            f"{path} does not hold {count} of together at most {MAX_BYTES} characters", field=field, hint=hint
        )
    return lines
