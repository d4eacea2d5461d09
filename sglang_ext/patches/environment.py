"""Environment variables that servers need on unusual machines: behind a proxy, without a user name or a home.

SGLang and its libraries take three things for granted. Their requests to this machine reach it, which fails
where `HTTP_PROXY` sends them elsewhere. The user has a name and a home directory that can be written, which
containers with a random user id lack. Sockets in `TMPDIR` have short paths.
Variables that the user has set stay.
"""

from __future__ import annotations

import codecs
import locale
import os
import pwd
import sys
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sglang_ext.errors import ConfigError
from sglang_ext.folders import own_folder

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Variables that send requests to a proxy, in lower or upper case."""
EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Hosts that are reached without a proxy. Libraries read one of both, and most prefer the first."""
USER_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables from which Python takes the user's name before it asks the password database."""
CACHES = {
    "XDG_CACHE_HOME": "",
    "SGLANG_CACHE_DIR": "sglang",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "CUDA_CACHE_PATH": "nv",
}
"""Caches that are below the home directory unless these variables say otherwise, and where each goes below
the folder that stands in for it. Hugging Face, numba and torch's extensions follow the first."""
HUGGING_FACE = "HF_HOME"
SOCKET_PATH_BYTES = 107
"""Of AF_UNIX."""
SOCKET_NAME_BYTES = 32
"""Of the longest path below TMPDIR that SGLang or multiprocessing gives a socket, its slash included."""
HOST_FLAGS = ("--host", "--kv-announce-host", "--dist-init-addr", "--kv-router")
"""Flags of a server that name members of its cluster: hosts, HOST:PORT or URLs, with commas between them."""


@dataclass(frozen=True)
class User:
    """The user whose process this is."""

    uid: int
    named: bool
    """Whether the password database has an entry."""
    home: Path | None
    """None where neither `HOME` nor the password database names one."""
    home_writable: bool


def current_user(environment: Mapping[str, str]) -> User:
    """The user of this process, and whether files can be made in the home directory."""
    uid = os.geteuid()
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        entry = None
    path = environment.get("HOME") or (entry.pw_dir if entry is not None else "")
    home = Path(path) if path else None
    return User(uid, entry is not None, home, home is not None and _writable(home))


def _writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def direct(environment: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Variables by which loopback and ``hosts`` are reached without a proxy; empty where there is no proxy.

    Both spellings get what either had: a library that reads only one would miss the exceptions in the other.
    """
    if not any(environment.get(name) or environment.get(name.upper()) for name in PROXIES):
        return {}
    given = [word.strip() for name in EXCEPTIONS for word in environment.get(name, "").split(",")]
    words = ",".join(dict.fromkeys(word for word in (*given, *LOOPBACK, *hosts) if word))
    return dict.fromkeys(EXCEPTIONS, words)


def hosts_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The hosts of the cluster that a server's command line names."""
    found = []
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name not in HOST_FLAGS:
            continue
        value = value if equals else "".join(arguments[position + 1 : position + 2])
        found += [_host(each.strip()) for each in value.split(",")]
    return tuple(dict.fromkeys(host for host in found if host and host not in ("0.0.0.0", "::")))


def _host(text: str) -> str:
    if text.count(":") > 1 and "[" not in text and "//" not in text:
        return text  # an IPv6 address
    try:
        return urlsplit(text if "//" in text else f"//{text}").hostname or ""
    except ValueError:
        return ""


def named(environment: Mapping[str, str], user: User) -> dict[str, str]:
    """A variable with a name for a user who has none: torch and others name folders by it."""
    if user.named or any(environment.get(name) for name in USER_NAMES):
        return {}
    return {"LOGNAME": f"uid-{user.uid}"}


def caches(environment: Mapping[str, str], user: User, folder: Path) -> dict[str, str]:
    """The variables that move caches from a home directory that cannot be written; empty where it can.

    Args:
        environment: variables that are set, which stay.
        user: the owner of the home directory.
        folder: where caches go instead.
    """
    if user.home_writable:
        return {}
    found = {name: str(folder / below) for name, below in CACHES.items()}
    downloads = None if user.home is None else user.home / ".cache" / "huggingface"
    if "XDG_CACHE_HOME" not in environment and downloads is not None and downloads.is_dir():
        # Models and tokens that are there are read from there.
        found[HUGGING_FACE] = str(downloads)
    if user.home is None:
        found["HOME"] = str(folder)
    return {name: value for name, value in found.items() if not environment.get(name)}


def utf8(encoding: str) -> dict[str, str]:
    """The variable by which Python reads text files as UTF-8; empty where the locale's encoding is that.

    torch and SGLang read their own sources and models' files in the encoding of the locale. In ASCII they
    cannot even be imported, so that this wins over a ``PYTHONUTF8=0`` of the user's.
    """
    return {} if codecs.lookup(encoding).name == "utf-8" else {"PYTHONUTF8": "1"}


def _cache_folder(uid: int) -> Path:
    """A folder of this user's that stays, for caches that are worth keeping from start to start.

    Raises:
        ConfigError: it cannot be made, or another user has made it.
    """
    folder = Path(tempfile.gettempdir()) / f"sglang-ext-cache-{uid}"
    try:
        own_folder(folder, "XDG_CACHE_HOME", make=True)
        seen = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"the home directory cannot be written, nor {folder}: {error.strerror}",
            field="XDG_CACHE_HOME",
            hint="Set it to a folder that this user can write, or set HOME",
        ) from None
    if seen.st_uid != uid or folder.is_symlink():
        raise ConfigError(
            f"the home directory cannot be written, and {folder} is another user's",
            field="XDG_CACHE_HOME",
            hint="Set it to a folder of this user's, or set HOME",
        )
    return folder


def prepare(environment: MutableMapping[str, str], arguments: Sequence[str] = ()) -> None:
    """Set the variables that the libraries of a server need on this machine.

    Call it before torch or SGLang is imported: they read some of it then.

    Args:
        environment: of this process; its children inherit it.
        arguments: a server's command line, whose cluster is reached without a proxy.

    Raises:
        ConfigError: no folder for caches can be written; names the variable.
    """
    user = current_user(environment)
    environment.update(direct(environment, hosts_of(arguments)))
    environment.update(named(environment, user))
    environment.update(utf8(locale.getpreferredencoding(False)))
    if not user.home_writable:
        environment.update(caches(environment, user, _cache_folder(user.uid)))


def restart_in_utf8() -> None:
    """Begin this program again where text files would be read in another encoding than UTF-8, which Python
    chooses at its start. Call it after ``prepare``, which has Python choose UTF-8 then."""
    if utf8(locale.getpreferredencoding(False)):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def require_temporary(environment: Mapping[str, str]) -> Path:
    """The folder that ``TMPDIR`` names, or the system's.

    Python falls back to another one without a word where files cannot be made in it.

    Raises:
        ConfigError: files cannot be made there, or other users could exchange them.
    """
    given = environment.get("TMPDIR")
    folder = Path(given or tempfile.gettempdir())
    if given and not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
    elif given and not _writable(folder):
        reason = "cannot be written"
    else:
        own_folder(folder, "TMPDIR", shared=True)
        return folder
    raise ConfigError(
        f"{folder} {reason}", field="TMPDIR", hint="Make it, give another one, or unset the variable"
    )


def require_short_sockets(environment: Mapping[str, str]) -> None:
    """Refuse a ``TMPDIR`` in which SGLang's sockets would have longer paths than the kernel allows.

    Raises:
        ConfigError: naming TMPDIR.
    """
    folder = require_temporary(environment)
    longest = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES
    size = len(os.fsencode(folder))
    if size > longest:
        raise ConfigError(
            f"its path has {size} bytes; with more than {longest}, SGLang cannot make sockets in it",
            field="TMPDIR",
            hint="Give a shorter one, such as /tmp, or start the server with `sglang-ext serve`",
        )


def printable() -> None:
    """Have standard output escape characters that its encoding lacks, as a dash of ``--help`` in ASCII."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
