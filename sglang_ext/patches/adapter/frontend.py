"""A backend for SGLang's frontend language that announces each program's next call by itself.

    sgl.set_default_backend(AdvisingEndpoint("http://127.0.0.1:30000"))

A program's next call begins with its whole text so far. So when an answer is here and the program goes
on by itself (a tool call, Python, another agent), and when it forks, a hint says what is coming. A program
that ends instead leaves a hint that expires soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from sglang_ext.advise import Hints

NEXT_CALL_TTL_S = 30.0
LEAST_CHARACTERS = 64
"""Shorter prompts are computed sooner than a hint is sent."""


class AdvisingEndpoint(RuntimeEndpoint):  # type: ignore[misc]
    """As ``RuntimeEndpoint``, with hints. In front of a plain SGLang server these are refused and dropped."""

    def __init__(self, base_url: str, api_key: str | None = None, **more: Any) -> None:
        super().__init__(base_url, api_key, **more)
        self.hints = Hints(base_url, api_key)

    def _next(self, text: str) -> None:
        if len(text) >= LEAST_CHARACTERS:
            self.hints.hint(text=text, ttl_s=NEXT_CALL_TTL_S)

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, Any]:
        answer, info = super().generate(s, sampling_params)
        self._next(str(s.text_) + answer)
        return answer, info

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[tuple[str, Any]]:
        answer = ""
        for piece, info in super().generate_stream(s, sampling_params):
            answer += piece
            yield piece, info
        self._next(str(s.text_) + answer)

    def select(self, s: Any, choices: list[str], *rest: Any, **named: Any) -> Any:
        decision = super().select(s, choices, *rest, **named)
        self._next(str(s.text_) + decision.decision)
        return decision

    def commit_lazy_operations(self, s: Any) -> None:
        """The program forks: each branch begins with its text so far."""
        super().commit_lazy_operations(s)
        self._next(str(s.text_))

    def shutdown(self) -> None:
        self.hints.close()
        super().shutdown()
