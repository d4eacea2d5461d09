"""HTTP APIs whose requests go to workers as those of another one, and whose answers are translated back.

SGLang's servers rewrite these requests themselves, and take none of the router's own fields in them (the salt
of a tenant, the name of a request). The router rewrites them as SGLang does, so that everything the router
does for the other dialect holds for these, too.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.job import Job
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.usage import Usage
from sglang_ext.router.api.validation import Json


class RewrittenDialect(Dialect):
    """An API of which workers see no request; see ``Dialect.admitted_as``."""

    def parse(self, payload: Json, limits: Limits) -> Job:
        assert self.admitted_as is not None
        return self.admitted_as.parse(self.rewritten(payload, limits), limits)

    def only_warms(self, payload: Json) -> bool:
        return False  # SGLang has no such option in these APIs

    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        raise NotImplementedError("only of requests that only warm the cache")

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        pass  # the answers of workers are in the dialect admitted_as
