"""Asking a router about its cluster, from a command line: plain HTTP, with a key if there is one."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from sglang_ext.cluster_key import CLOCK_HEADER, ClusterKey, read_cluster_key
from sglang_ext.errors import ConfigError, PeerError, UserError
from sglang_ext.flags import Flagged, flag
from sglang_ext.flags.removed import ROUTER_ADDRESS

T = TypeVar("T")
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 << 20
KEY_VARIABLE = "SGLANG_EXT_API_KEY"


@dataclass(frozen=True)
class RouterClient:
    """One router.

    Args:
        api_key: an administrator's key.
        key: of the cluster; used when there is no API key.
        wall: seconds since the epoch, by this machine.
    """

    url: str
    api_key: str | None = None
    key: ClusterKey | None = None
    tls: ssl.SSLContext | None = None
    wall: Callable[[], float] = time.time

    def call(
        self, method: str, path: str, kind: type[T], body: Any = None, *, timeout_s: float = TIMEOUT_S
    ) -> T:
        """One call, whose answer is JSON.

        Raises:
            UserError: the router refuses the request as invalid.
            PeerError: it cannot be reached, or does not answer as a router.
        """
        try:
            return msgspec.json.decode(self.read(method, path, body, timeout_s=timeout_s), type=kind)
        except msgspec.MsgspecError as error:
            raise PeerError(f"{self.url} does not answer as this router does: {error}") from None

    def read(self, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> bytes:
        """One call; its answer as it comes.

        Raises:
            UserError: the router refuses the request as invalid.
            PeerError: it cannot be reached.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            return self._call(method, path, data, timeout_s, ahead_s=0.0)
        except _OtherClock as error:
            return self._call(method, path, data, timeout_s, ahead_s=error.ahead_s)

    def _call(self, method: str, path: str, data: bytes, timeout_s: float, *, ahead_s: float) -> bytes:
        headers = {"content-type": "application/json"} if data else {}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        elif self.key is not None:
            headers["authorization"] = self.key.sign(method, path, data, self.wall() + ahead_s)
        request = urllib.request.Request(self.url + path, data=data or None, headers=headers, method=method)
        # No proxy: the request is for this router, and no other host may see the key.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.tls)
        )
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                content: bytes = answer.read(MAX_ANSWER_BYTES)
                return content
        except urllib.error.HTTPError as error:
            with error:
                clock = error.headers.get(CLOCK_HEADER)
                if clock and self.key is not None and not ahead_s:
                    ahead = self.key.ahead(clock, headers["authorization"], self.wall())
                    if ahead is not None and abs(ahead) > 1.0:
                        raise _OtherClock(ahead) from None
                raise UserError(_reason(error)) from None
        except urllib.error.URLError as error:
            raise PeerError(f"cannot reach {self.url}: {error.reason}", field="--router") from None
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"cannot reach {self.url}: {error}", field="--router") from None


class _OtherClock(Exception):
    """The router refuses a signature, and its answer shows by how many seconds its clock is ahead."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__(ahead_s)
        self.ahead_s = ahead_s


def _reason(error: urllib.error.HTTPError) -> str:
    """The router's reason for refusing a request."""
    try:
        return str(json.loads(error.read(1 << 20))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the answer is {error.code} {error.reason}"


@dataclass(frozen=True, kw_only=True)
class RouterAddress(Flagged):
    """How a router is found and spoken to."""

    removed = ROUTER_ADDRESS

    router: str = flag(
        "http://127.0.0.1:30000",
        "The router. SSL_CERT_FILE names the certificates to trust for an https URL.",
        metavar="URL",
    )
    api_key: str | None = flag(
        None,
        "An administrator's key.",
        variable=KEY_VARIABLE,
        variable_only=True,
        secret=True,
    )
    cluster_key_file: str | None = flag(
        None,
        f"The key of the cluster, instead of an administrator's API key in the variable {KEY_VARIABLE}.",
        metavar="FILE",
    )

    def client(self) -> RouterClient:
        """The router that the flags name.

        Raises:
            ConfigError: a file of theirs cannot be used.
        """
        url = self.router if "://" in self.router else f"http://{self.router}"
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not of the form http://host:port", field="--router")
        tls = ssl.create_default_context() if url.startswith("https:") else None
        key = read_cluster_key(self.cluster_key_file) if self.cluster_key_file else None
        return RouterClient(url.rstrip("/"), self.api_key, key, tls)


def quoted(instance: str) -> str:
    """The id of an instance, or its URL, as it stands in a path."""
    return quote(instance, safe=":")
