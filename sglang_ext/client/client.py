"""Calls of a router's own API, each of which waits for its answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote, urlencode

from .connection import Address, hint_fields
from .types import Document, Explanation, Hint

SESSION_HEADER = "x-session-id"
TIMEOUT_S = 30.0


class RouterError(Exception):
    """A router refused a call.

    Args:
        status: of the HTTP answer.
        code: the router's word for the reason, such as ``unknown_session``.
        message: a sentence.
        retry_after_s: seconds after which to try again, where the router names them.
    """

    def __init__(self, status: int, code: str | None, message: str, retry_after_s: float | None) -> None:
        super().__init__(f"{status}{'' if code is None else f' {code}'}: {message}")
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s


@dataclass(frozen=True)
class Confirmation:
    """How the end of an answer was reported by a server with ``--kv-durability acked``.

    end: ``durable``, ``behind``, ``late``, ``refused``, ``lost`` or ``uncached``.
    """

    end: str

    @property
    def durable(self) -> bool:
        """Whether the KV of the conversation so far was on disk before the answer ended."""
        return self.end == "durable"


def confirmation(answer: Mapping[str, Any]) -> Confirmation | None:
    """The confirmation in an answer of ``/v1/chat/completions``, ``/v1/completions`` or ``/generate`` in one
    piece; None where its server does not wait for its disk. Of others, see ``Client.confirmation``.
    """
    for holder in ("sglext", "meta_info"):
        details = (answer.get(holder) or {}).get("cached_tokens_details") or {}
        if isinstance(end := details.get("durability_end"), str):
            return Confirmation(end)
    return None


@dataclass(frozen=True)
class Session:
    """A session by the name that its requests carry.

    client: of the router. name: not empty.
    """

    client: Client
    name: str

    @property
    def headers(self) -> dict[str, str]:
        """For each request of the session: ``extra_headers`` or ``default_headers`` of client libraries."""
        return {SESSION_HEADER: self.name}

    def hint(self, **hint: Any) -> Hint:
        """Announce the session's next request: see ``Client.hint``."""
        return self.client.hint(session=self.name, **hint)


class Client:
    """A router's own API. May be shared between threads: each call has a connection of its own.

    Args:
        url: of the router.
        api_key: where it asks for one.
        timeout_s: the longest wait for each part of an answer.

    Raises:
        ValueError: ``url`` is not of the form ``http://host:port``.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = Address(url, api_key)
        self._timeout_s = timeout_s

    # -- hints ------------------------------------------------------------------------------------

    def hint(
        self,
        *,
        session: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        earliest_s: float = 0.0,
        ttl_s: float | None = None,
        priority: int | None = None,
    ) -> Hint:
        """Announce a request, and wait for the router's decision; arguments are those of ``Hints.hint``.

        Raises:
            RouterError: 429: a limit is used up; 404: the session is unknown and no conversation is given.
        """
        fields = hint_fields(session, messages, text, input_ids, earliest_s, ttl_s, priority)
        return cast(Hint, self._call("POST", "/v1/advisory", fields))

    def hint_state(self, id: str, wait_s: float = 0.0) -> Hint:
        """A hint's state, once it is ready or has ended, or after ``wait_s`` seconds (0 to 60)."""
        query = f"?{urlencode({'wait_s': wait_s})}" if wait_s else ""
        return cast(Hint, self._call("GET", f"/v1/advisory/{_quoted(id)}{query}", more_s=wait_s))

    def withdraw(self, id: str) -> Hint:
        """Take a hint back: its request will not come."""
        return cast(Hint, self._call("DELETE", f"/v1/advisory/{_quoted(id)}"))

    # -- documents --------------------------------------------------------------------------------

    def put_document(
        self,
        id: str,
        *,
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | None = None,
        ttl_s: float | None = None,
        instances: int | None = None,
        extra_key: str | None = None,
        priority: int | None = None,
    ) -> Document:
        """Register a named beginning of prompts, whose KV is held back. Requests name it in ``document_ids``.

        Args:
            id: 1 to 128 letters, digits, ``.``, ``_`` and ``-``.
            text, messages, input_ids: the content; one of them.
            ttl_s: how long it lives.
            instances: at how many instances its KV is held back.
            extra_key: the ``extra_key`` of the requests that will name it.
            priority: against other announced KV.
        """
        fields = {
            "text": text,
            "messages": None if messages is None else list(messages),
            "input_ids": None if input_ids is None else list(input_ids),
            "ttl_s": ttl_s,
            "instances": instances,
            "extra_key": extra_key,
            "priority": priority,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return cast(Document, self._call("PUT", f"/v1/documents/{_quoted(id)}", given))

    def document(self, id: str) -> Document:
        """A document, where its KV is held back, and in which tiers it is."""
        return cast(Document, self._call("GET", f"/v1/documents/{_quoted(id)}"))

    def documents(self) -> list[Document]:
        """The documents of this key's tenant."""
        return cast("list[Document]", self._call("GET", "/v1/documents")["data"])

    def delete_document(self, id: str) -> None:
        """Delete a document."""
        self._call("DELETE", f"/v1/documents/{_quoted(id)}")

    # -- sessions ---------------------------------------------------------------------------------

    def session(self, name: str) -> Session:
        """A session by a name that the program chooses; nothing is sent."""
        if not name:
            raise ValueError("a session's name is not empty")
        return Session(self, name)

    def open_session(
        self, capacity_of_str_len: int, *, session_id: str | None = None, timeout: float | None = None
    ) -> str:
        """Open one of SGLang's sessions (for ``session_params`` of ``/generate``), and return its name.

        Args:
            capacity_of_str_len: characters that it may have.
            session_id: its name; the router chooses one otherwise.
            timeout: seconds without a request after which the server closes it.
        """
        fields = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id, "timeout": timeout}
        given = {name: value for name, value in fields.items() if value is not None}
        return cast(str, self._call("POST", "/open_session", given))

    def close_session(self, session_id: str) -> None:
        """Close one of SGLang's sessions."""
        self._call("POST", "/close_session", {"session_id": session_id})

    # -- answers ----------------------------------------------------------------------------------

    def explain(self, request_id: str) -> Explanation:
        """Why a request hit or missed.

        Args:
            request_id: the header ``x-request-id`` of the request or its answer, or the answer's ``id``.
        """
        return cast(Explanation, self._call("GET", f"/explain/{_quoted(request_id)}"))

    def confirmation(self, request_id: str) -> Confirmation | None:
        """How the end of an answer was reported, of a stream too; None where its server does not wait for its
        disk.

        Args:
            request_id: as in ``explain``.
        """
        end = self.explain(request_id).get("durability")
        return None if end is None else Confirmation(end)

    # ---------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Any = None, more_s: float = 0.0) -> Any:
        """The JSON of an answer; None for an empty one.

        Raises:
            RouterError: the router refuses.
            OSError: the router cannot be reached, or does not answer in time.
        """
        connection = self._address.connect(self._timeout_s + more_s)
        sent = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._address.path + path, sent, self._address.headers)
            response = connection.getresponse()
            answer = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"the router's answer broke off: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise _refusal(response.status, answer, response.getheader("retry-after"))
        return json.loads(answer) if answer else None


def _quoted(id: str) -> str:
    return quote(id, safe="")


def _refusal(status: int, answer: bytes, retry_after: str | None) -> RouterError:
    try:
        error = json.loads(answer)["error"]
        code, message = error.get("code"), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message = None, answer[:200].decode(errors="replace")
    wait = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
    return RouterError(status, code, message, wait)
