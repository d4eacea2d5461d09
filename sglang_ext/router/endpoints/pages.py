"""The chat page under ``/ui``: files of the package, served as they are; ``/`` leads browsers there.

The page holds no secret and no state of the cluster, so it is open; its requests to the router need a key
where one is set. It loads nothing from other sites, and its headers have the browser enforce that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import aiofiles

from sglang_ext.router.endpoints.routes import Access, Route
from sglang_ext.router.http.types import JSON_TYPE, Request, RequestRefused, Responder
from sglang_ext.router.telemetry.record import Record

PATH = "/ui"
_FIRST = "index.html"
_ROOT = b'"SGLang is running"'
"""The answer of SGLang's server at ``/``, by which clients recognize one."""
_NAME = re.compile(r"[a-z0-9_-]+\.[a-z]+")
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


FOLDER = Path(str(resources.files("sglang_ext.router"))) / "static" / "ui"


async def _read(name: str) -> _File | None:
    """A file of the page; None where there is none of this name."""
    kind = _TYPES.get(name.rpartition(".")[2])
    if kind is None or not _NAME.fullmatch(name):
        return None
    try:
        async with aiofiles.open(FOLDER / name, "rb") as file:
            body = await file.read()
    except OSError:
        return None
    return _File(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def page_routes() -> Iterator[Route]:
    """The endpoints of the page."""
    files: dict[str, _File] = {}
    """Those that were asked for: they stay as they are for as long as the router runs."""

    async def send(request: Request, responder: Responder, record: Record) -> None:
        name = request.path.removeprefix(PATH).removeprefix("/") or _FIRST
        file = files.get(name) or await _read(name)
        if file is None:
            raise RequestRefused(f"the page has no file {name[:80]!r}", status=404, code="not_found")
        files[name] = file
        headers = {
            "content-type": file.content_type,
            "etag": file.etag,
            "cache-control": "no-cache",
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        unchanged = request.headers.get("if-none-match") == file.etag
        record.status = 304 if unchanged else 200
        await responder.send(record.status, headers, b"" if unchanged else file.body)

    async def send_root(request: Request, responder: Responder, record: Record) -> None:
        browses = "text/html" in request.headers.get("accept", "")
        record.status = 302 if browses else 200
        headers = {"location": PATH} if browses else {"content-type": JSON_TYPE}
        await responder.send(record.status, headers, b"" if browses else _ROOT)

    methods = frozenset({"GET", "HEAD"})
    yield Route("/", methods, send_root, Access.OPEN, logged=False)
    yield Route(PATH, methods, send, Access.OPEN, logged=False)
    yield Route(PATH + "/", methods, send, Access.OPEN, logged=False)
