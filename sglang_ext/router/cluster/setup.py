"""How a router's cluster is put together from its flags: where membership is kept, and by which key."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from sglang_ext.clock import Clock
from sglang_ext.cluster_key import ClusterKey, read_secret
from sglang_ext.errors import ConfigError
from sglang_ext.router.cluster.membership import EmbeddedMembership, Membership
from sglang_ext.router.cluster.membership_local import LocalMembership
from sglang_ext.tasks import Rounds

EMBEDDED = "embedded"
LOCAL = "local"
SCHEMES = ("redis", "rediss", "unix", LOCAL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_cluster(url: str, name: str, password_file: str | None, is_loopback: Callable[[str], bool]) -> None:
    """Check ``--cluster``, ``--cluster-name`` and ``--cluster-password-file``.

    Raises:
        ConfigError: one of them cannot work.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name", field="--cluster-name", hint="Letters, digits, . _ -")
    if url == EMBEDDED:
        if password_file is not None:
            raise ConfigError("there is no Redis that it is for", field="--cluster-password-file")
        return
    forms = "local:///FOLDER, redis://HOST:PORT, rediss://HOST:PORT or unix:///SOCKET"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError(f"is not 'embedded' and not of the form {forms}", field="--cluster") from None
    on_disk = parts.scheme in ("unix", LOCAL)
    has_place = parts.path if on_disk else parts.hostname
    if parts.scheme not in SCHEMES or not has_place:
        raise ConfigError(f"is not 'embedded' and not of the form {forms}", field="--cluster")
    if parts.scheme == LOCAL and password_file is not None:
        raise ConfigError("there is no Redis that it is for", field="--cluster-password-file")
    has_password = bool(parts.password or parse_qs(parts.query).get("password") or password_file)
    if not on_disk and not is_loopback(parts.hostname or "") and not has_password:
        raise ConfigError(
            f"{parts.hostname} is another machine, and no password is given",
            field="--cluster",
            hint="Its writers decide where prompts are sent: set requirepass in Redis, and give "
            "--cluster-password-file",
        )


def open_membership(
    url: str,
    name: str,
    password_file: str | None,
    router: str,
    clock: Clock,
    key: ClusterKey | None,
    rounds: Rounds,
) -> Membership:
    """The membership that ``--cluster`` names.

    Raises:
        ConfigError: the Redis client is not installed, or the password cannot be read.
    """
    if url == EMBEDDED:
        return EmbeddedMembership()
    if (parts := urlsplit(url)).scheme == LOCAL:
        return LocalMembership(Path(parts.path), router, clock, rounds=rounds)
    from sglang_ext.router.cluster.membership_redis import RedisMembership

    password = None
    if password_file is not None:
        password = read_secret(password_file, field="--cluster-password-file").decode("utf-8", "replace")
    return RedisMembership(url, router, clock, name=name, password=password, key=key, rounds=rounds)
