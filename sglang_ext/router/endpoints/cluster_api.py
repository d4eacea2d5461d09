"""The endpoints under ``/cluster``: instances register and leave here, people look, drain and change.

Access: instances with the key of the cluster; people with that key or an administrator's API key. Without a
cluster key, only a router that listens on loopback accepts registrations, and only of instances of this
machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sglang_ext.addresses import is_loopback
from sglang_ext.clock import Clock
from sglang_ext.cluster_key import CLOCK_HEADER, ClusterKey
from sglang_ext.errors import SglangExtError, UserError
from sglang_ext.protocol.cluster import PATH, ChangeRole, Drain, Instances, Registration, decode, encode
from sglang_ext.router.cluster.members import CannotChangeRole, Members, Unknown
from sglang_ext.router.cluster.members_view import cluster, instance_view, instances
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.router.cluster.role_controller import RoleController
from sglang_ext.router.cluster.roster import Taken
from sglang_ext.router.cluster.shared_replays import SharedReplays
from sglang_ext.router.endpoints.routes import Access, Route
from sglang_ext.router.http.types import JSON_TYPE, Request, RequestRefused, Responder
from sglang_ext.router.http.web_sites import WebSites
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.tenants import KeyRing

T = TypeVar("T")
ACTIONS = ("drain", "role")


class ClusterApi:
    """Answers requests under ``/cluster``.

    Args:
        controller: wishes changes.
        key: of the cluster; ``None`` when there is none.
        keys: API keys; those of administrators are good here.
        local: whether the router listens on loopback only.
        clock: for signatures.
        sites: the web pages that may call endpoints without a key.
        replays: has the used signatures.
    """

    def __init__(
        self,
        members: Members,
        roles: RoleChanges,
        controller: RoleController,
        queries: Queries,
        key: ClusterKey | None,
        keys: KeyRing,
        clock: Clock,
        sites: WebSites,
        replays: SharedReplays,
        *,
        local: bool,
    ) -> None:
        self._members = members
        self._roles = roles
        self._controller = controller
        self._queries = queries
        self._key = key
        self._keys = keys
        self._replays = replays
        self._local = local
        self._clock = clock
        self._sites = sites

    def routes(self) -> Iterator[Route]:
        """The endpoints."""
        yield Route("/cluster", frozenset({"GET"}), self._cluster, Access.OWN)
        yield Route(PATH, frozenset({"GET", "POST"}), self._all, Access.OWN)
        yield Route(PATH + "/", frozenset({"GET", "POST", "DELETE"}), self._one, Access.OWN)

    # -- endpoints ------------------------------------------------------------------------------------------

    async def _cluster(self, request: Request, responder: Responder, record: Record) -> None:
        self._check_admin(request)
        await self._send(responder, record, cluster(self._members, self._controller.view()))

    async def _all(self, request: Request, responder: Responder, record: Record) -> None:
        if request.method == "GET":
            self._check_admin(request)
            await self._send(responder, record, Instances(instances=instances(self._members)))
            return
        self._check_member(request)
        registration = _decoded(request, Registration)
        if self._key is None and not is_loopback(urlsplit(registration.url).hostname or ""):
            raise RequestRefused(
                f"{registration.url} is not on this machine, and this router has no cluster key; "
                "start it with --cluster-key-file",
                status=403,
                param="url",
                code="no_cluster_key",
                kind="permission_error",
            )
        if self._key is not None and registration.agent and not registration.agent_key:
            raise RequestRefused(
                f"{registration.agent} asks for no key, and this cluster has one: any process there could "
                "speak for the instance. Start it with --kv-cluster-key-file",
                status=403,
                param="agent_key",
                code="no_agent_key",
                kind="permission_error",
            )
        try:
            answer = self._members.register(registration)
        except Taken as error:
            raise _refused(error, 409, "name_taken") from None
        await self._send(responder, record, answer)

    async def _one(self, request: Request, responder: Responder, record: Record) -> None:
        name, action = _split(request.path)
        if request.method == "DELETE" and not action:
            self._check_member(request, or_admin=True)
        else:
            self._check_admin(request)
        try:
            member = await self._queries.found(lambda: self._members.member(name))
            if request.method == "DELETE" and not action:
                self._members.leave(member.instance)
            elif request.method == "POST" and action == "drain":
                self._drain(member.instance, _decoded(request, Drain))
            elif request.method == "POST" and action == "role":
                await self._roles.change(member.instance, _decoded(request, ChangeRole).role)
            elif request.method != "GET" or action:
                raise _not_allowed(request, action)
        except Unknown as error:
            raise _refused(error, 404, "no_such_instance") from None
        except CannotChangeRole as error:
            raise _refused(error, 409, "role_is_fixed") from None
        usable = {instance.name: instance for instance in self._members.fleet.usable()}
        member = self._members.roster.get(member.instance) or member
        await self._send(responder, record, instance_view(self._members, member, usable))

    def _drain(self, instance: str, wish: Drain) -> None:
        if wish.cancel:
            self._members.resume(instance)
        else:
            self._members.drain(instance, wish.deadline_s)

    async def _send(self, responder: Responder, record: Record, answer: Any) -> None:
        record.status = 200
        headers = {"content-type": JSON_TYPE, "x-request-id": record.request_id}
        await responder.send(200, headers, encode(answer))

    # -- who may --------------------------------------------------------------------------------------------

    def _check_member(self, request: Request, *, or_admin: bool = False) -> None:
        """Refuse a request that no member has signed. Without a cluster key, a router on loopback refuses
        those of foreign web pages, and any other router refuses all.
        """
        if self._key is None:
            if self._local:
                self._sites.check(request)
                return
            raise RequestRefused(
                "instances cannot register: this router can be reached from other machines and has no "
                "cluster key; start it with --cluster-key-file",
                status=403,
                code="no_cluster_key",
                kind="permission_error",
            )
        why = self._not_signed(request, self._key)
        if why is None or (or_admin and self._is_admin(request)):
            return
        raise RequestRefused(
            f"the request is refused: {why}",
            status=401,
            kind="authentication_error",
            code="not_a_member",
            headers=self._clock_header(request, self._key),
        )

    def _check_admin(self, request: Request) -> None:
        """Refuse a request with neither a member's signature nor an administrator's key."""
        if self._is_admin(request):
            return
        if self._key is not None and self._not_signed(request, self._key) is None:
            return
        raise RequestRefused(
            "this needs an administrator's key ('Authorization: Bearer KEY') or the key of the cluster",
            status=401,
            kind="authentication_error",
            code="not_an_admin",
            headers={
                "www-authenticate": "Bearer",
                **({} if self._key is None else self._clock_header(request, self._key)),
            },
        )

    def _clock_header(self, request: Request, key: ClusterKey) -> dict[str, str]:
        """By which a member whose clock is another signs again."""
        clock = key.clock(request.headers.get("authorization", ""), self._clock.wall())
        return {CLOCK_HEADER: clock} if clock else {}

    def _not_signed(self, request: Request, key: ClusterKey) -> str | None:
        """Why a request is not a member's."""
        return self._replays.problem(request, key)

    def _is_admin(self, request: Request) -> bool:
        if not self._keys.asks:
            return self._local
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        caller = self._keys.caller(given.strip()) if scheme.lower() == "bearer" else None
        return caller is not None and caller.admin


def _split(path: str) -> tuple[str, str]:
    """(instance, action or nothing) of a path under ``PATH``."""
    rest = path[len(PATH) + 1 :]
    name, _, action = rest.rpartition("/")
    return (name, action) if name and action in ACTIONS else (rest, "")


def _decoded(request: Request, kind: type[T]) -> T:
    try:
        return decode(request.body, kind)
    except UserError as error:
        raise RequestRefused(str(error), param=error.field, code="invalid_body") from None


def _refused(error: SglangExtError, status: int, code: str) -> RequestRefused:
    return RequestRefused(str(error), status=status, param=error.field, code=code)


def _not_allowed(request: Request, action: str) -> RequestRefused:
    allowed = "POST" if action else "GET, DELETE"
    return RequestRefused(
        f"{request.path[:200]} takes {allowed}, not {request.method}",
        status=405,
        code="method_not_allowed",
        headers={"allow": allowed},
    )
