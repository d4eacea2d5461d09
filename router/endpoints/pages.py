"""The chat page under ``/ui``: files of the package, served as they are.

The page holds no secret and no state of the cluster, so it is open; what it asks of the router needs a key
where one is set. It loads nothing from anywhere else, and the browser is told to see to that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from sglang_ext.router.endpoints.routes import Access, Route
from sglang_ext.router.http.types import Request, RequestRefused, Responder
from sglang_ext.router.telemetry.record import Record

PATH = "/ui"
_FIRST = "index.html"
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


def _files() -> dict[str, _File]:
    folder = resources.files("sglang_ext.router") / "static" / "ui"
    found = {}
    for item in folder.iterdir():
        kind = _TYPES.get(item.name.rpartition(".")[2])
        if kind is not None:
            body = item.read_bytes()
            found[item.name] = _File(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


def page_routes() -> Iterator[Route]:
    """The endpoints of the page."""
    files = _files()

    async def send(request: Request, responder: Responder, record: Record) -> None:
        name = request.path.removeprefix(PATH).removeprefix("/") or _FIRST
        file = files.get(name)
        if file is None:
            raise RequestRefused(f"the page has no file {name[:80]!r}", status=404, code="not_found")
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

    methods = frozenset({"GET", "HEAD"})
    yield Route(PATH, methods, send, Access.OPEN, logged=False)
    yield Route(PATH + "/", methods, send, Access.OPEN, logged=False)
