"""``POST /query``: the index, asked by other gateways in the form of Mooncake's KV-indexer API (RFC 1403).

The answer covers the caller's own namespace only: with tenants, the router puts the salt of the key's tenant
in, as with every prompt, so that a key does not reveal whether another tenant's prompt is cached. Endpoints
that would reveal prompts themselves (Dynamo's ``/dump``) do not exist here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sglang_ext.keys import encode_tokens
from sglang_ext.router.api.validation import Json, check_ids, parse_json_object, take_int, take_string, wrong
from sglang_ext.router.dispatch.choosing import no_worker
from sglang_ext.router.endpoints.information import send_json
from sglang_ext.router.endpoints.routes import Route
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.http.types import Request, RequestRefused, Responder
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies import Match
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admit import check_reserved
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.tiers import Tier, all_tiers

MEDIA: Final = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.DISK: "DISK"}
DEFAULT_TENANT: Final = "default"
"""The name, in answers, of the tenant of a router without tenants, as in the API."""
MAX_BLOCK: Final = 1 << 20


class IndexerApi:
    """Answers ``/query``.

    Args:
        trees: asked.
    """

    def __init__(self, fleet: Fleet, trees: Index) -> None:
        self._fleet = fleet
        self._trees = trees

    def routes(self) -> Iterator[Route]:
        """The endpoint."""
        yield Route("/query", frozenset({"POST"}), self._query)

    async def _query(self, request: Request, responder: Responder, record: Record) -> None:
        answer = self._answer(parse_json_object(request.body), record.caller)
        record.status = 200
        await send_json(responder, 200, answer)

    def _answer(self, payload: Json, caller: Caller) -> Json:
        model = self._fleet.model
        if model is None:
            raise no_worker(self._fleet)
        check_reserved(payload, caller, None)
        limits = model.limits
        named = take_string(payload, "model")
        if named and named != model.model.name:
            raise RequestRefused(
                f"model {named[:128]!r} is not served here, {model.model.name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )
        tenant = caller.tenant or DEFAULT_TENANT
        if (take_string(payload, "tenant_id") or tenant) != tenant:
            raise RequestRefused(
                "tenant_id is another tenant's; a key asks for its own",
                status=403,
                param="tenant_id",
                code="other_tenant",
                kind="permission_error",
            )
        if "token_ids" not in payload:
            raise wrong("token_ids", "an array of token ids", None)
        ids = check_ids(payload["token_ids"], "token_ids", limits.vocab_size)
        block = take_int(payload, "block_size", least=1, most=MAX_BLOCK) or self._trees.block_size
        salt = take_string(payload, "cache_salt") if caller.salt is None else caller.salt
        namespace = ("tokens", take_string(payload, "lora_name") or None, None, salt or None)
        found = self._trees.match(namespace, encode_tokens(ids[: limits.context_length]))
        only = take_string(payload, "instance_id")
        usable = [instance.name for instance in self._fleet.usable() if only in (None, "", instance.name)]
        return {tenant: {name: tokens_by_medium(found.get(name, Match(0)), block) for name in usable}}


def tokens_by_medium(match: Match, block: int) -> Json:
    """One instance's part of the answer: tokens of the prefix that are in a medium or a nearer one."""
    by_medium: Json = {}
    tokens = match.tokens - sum(match.below.values())
    for tier in all_tiers():
        tokens += match.below.get(tier, 0)
        by_medium[MEDIA.get(tier, tier.name.upper())] = tokens // block * block
    longest = match.tokens // block * block
    return {"longest_matched": longest, **by_medium, "DP": {"0": longest}}
