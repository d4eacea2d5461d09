"""Membership messages between instances, routers, and clients: JSON over HTTP.

An instance sends ``POST /cluster/instances`` with a `Registration` and receives `Registered`. Repeating it
with the same epoch changes nothing. An instance repeats it whenever no router's heartbeat has arrived for
``verdict_s``, so that a restarted router finds its instances again. A new epoch is a restart: the router
drops the index of the former epoch, and resources held for it are freed. An instance leaves by ``DELETE
/cluster/instances/{instance}``.

People and programs read `Cluster` (``GET /cluster``) and `Instances` (``GET /cluster/instances``), and send
`Drain` and `ChangeRole` to ``POST /cluster/instances/{instance}/drain`` and ``.../role``.

Every field is bounded; a message out of bounds is refused with the name of the field (`decode`). Requests are
signed with the key of the cluster (``sglang_ext.cluster_key``).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from sglang_ext.errors import UserError

PROTOCOL: Final = 2
"""Changes when an older router would misunderstand a newer instance, or the other way round. From 2 on, a
server that registers takes a tenant's salt in a header (``keys.SALT_HEADER``)."""

PATH: Final = "/cluster/instances"
MAX_BODY_BYTES: Final = 64 << 10
HEARTBEAT_S: Final = 1.0
"""Seconds between two heartbeats, in each direction of an agent's channel."""
VERDICT_S: Final = 3.0
"""Seconds without a heartbeat after which a member is considered dead."""

InstanceId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}$")]
"""The name of an instance: unique in its cluster, the same after a restart; part of a URL path."""
EpochHex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
"""``wire.Epoch`` as 32 hex digits."""
Url = Annotated[str, msgspec.Meta(min_length=8, max_length=512)]
AgentAddress = Annotated[str, msgspec.Meta(max_length=300)]
CurvePublicKey = Annotated[str, msgspec.Meta(pattern=r"^(|[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40})$")]
"""Z85 of 32 bytes, or nothing."""
Text = Annotated[str, msgspec.Meta(max_length=512)]
Settings = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=128)], Annotated[str, msgspec.Meta(max_length=128)]],
    msgspec.Meta(max_length=256),
]
"""Settings of a server by name."""
RoleName = Literal["colocated", "prefill", "decode"]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]

T = TypeVar("T")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of messages to a router."""


class Registration(Body, frozen=True, kw_only=True):
    """An instance's identity, addresses and settings."""

    url: Url
    """Its HTTP address as the router reaches it: ``http://host:port``; of a replica, that and its rank
    (`url_of_replica`)."""
    instance: InstanceId
    epoch: EpochHex
    role: RoleName = "colocated"
    agent: AgentAddress = ""
    """``tcp://host:port`` of its agent; empty for an instance without one, which is probed by HTTP."""
    agent_key: CurvePublicKey = ""
    """The agent's public CURVE key; empty when the cluster has no key."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 16
    model: Text = ""
    """``served_model_name``."""
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    pp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    namespace: Text = ""
    """Identity of this instance's KV; KV moves only between instances with the same value."""
    endpoints: Annotated[tuple[AgentAddress, ...], msgspec.Meta(max_length=256)] = ()
    """``host:port`` of each rank, where peers read its DRAM; none for an instance that does not export."""
    computes: bool = False
    """Whether it computes uncached tokens of an announced prompt (``--kv-advisory-compute``)."""
    splits: bool = False
    """Whether it takes part in computing one prompt with others: it exports each layer that it has computed,
    and computes behind layers that still come."""
    keeps_states: bool = False
    """Whether it keeps recurrent states of its model where a router says so (``keys.KEEP_HEADER``)."""
    for_others: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 0
    """Blocks that it keeps for other instances in idle DRAM (``--kv-dram-size for-others``)."""
    settings: Settings = {}
    """Of its model, and of its KV's data type: `compatibility.bounded`."""
    handover: Settings = {}
    """Further settings that both halves of a prefill-decode pair must share; empty for an instance without
    our transfer backend."""
    weights: Text = ""
    """Digest of rank 0's weights at the start, where they were read."""
    device: Text = ""
    """Name of rank 0's device, as its driver has it, or such as ``cpu, 16 cores``; empty when unknown."""
    device_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 56)] = 0
    """Memory of that device; 0 when it is not known."""
    protocol: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = PROTOCOL

    def __post_init__(self) -> None:
        problem = url_problem(self.url)
        if problem is not None:
            raise ValueError(f"url: {self.url!r} {problem}")
        if self.agent and not _is_tcp(self.agent):
            raise ValueError(f"agent: {self.agent!r} is not of the form tcp://host:port")
        if self.protocol != PROTOCOL:
            raise ValueError(f"protocol: {other_release(self.protocol, PROTOCOL)}")


class Drain(Body, frozen=True, kw_only=True):
    """Give an instance no new requests; let it go when the running ones have ended.

    deadline_s: after so long it goes although requests are still running, which then go on to their end
    without being counted on.
    """

    deadline_s: Seconds = 600.0
    cancel: bool = False
    """Take a drain back that has not ended: the instance is given requests again."""


class ChangeRole(Body, frozen=True, kw_only=True):
    """Make an instance prefill, decode or both from now on."""

    role: RoleName


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a registration."""

    router: Text
    """Name of this router; another one after each start."""
    instance: InstanceId
    state: Text
    """The state of the instance, as this router sees it."""
    problem: Text = ""
    """Why this router does not reach the instance, which registers again; empty when it does."""
    heartbeat_s: float = HEARTBEAT_S
    verdict_s: float = VERDICT_S
    protocol: int = PROTOCOL


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """How far a drain has come."""

    since_s: float
    deadline_s: float
    """Seconds that are left."""
    in_flight: int
    """Requests of this router that it still has to finish."""


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """How another router sees an instance."""

    router: str
    state: str
    in_flight: int


class TierFill(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a tier holds, and how many fit. spilled: the part of them held for other instances."""

    used: int
    size: int
    spilled: int = 0


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as a router sees it."""

    instance: str
    """Its id; for a URL from ``--worker-urls`` without a registration, the URL's host and port."""
    url: str
    role: str
    state: str
    why: str
    """Why it is in this state, in words."""
    registered: bool
    """Whether it registered itself; otherwise it was listed with ``--worker-urls``."""
    epoch: str = ""
    agent: str = ""
    model: str = ""
    block_size: int = 0
    tp_size: int = 1
    device: str = ""
    """Name of its device, as it registered."""
    in_flight: int = 0
    queued_tokens: int = 0
    cached_tokens: int = 0
    trusted: bool = True
    """Whether its index is complete and trusted."""
    awaited: bool = False
    """Whether its snapshot is expected and has not arrived completely: the index is empty or incomplete."""
    usable: bool = False
    """Whether new requests are routed to it."""
    last_seen_s: float | None = msgspec.field(name="heard_s", default=None)
    """Seconds since its last sign of life."""
    draining: Draining | None = None
    elsewhere: tuple[Elsewhere, ...] = ()
    """How the other routers see it."""
    tiers: dict[str, TierFill] = {}
    """How full its tiers are, as its agent reports: ``hbm``, ``dram``, ``disk``. A tier that it does not have
    is absent; without a recent heartbeat, all are."""


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """Where membership is stored."""

    kind: str
    """``embedded``, ``local`` or ``redis``."""
    connected: bool = True
    since_s: float = 0.0
    """Seconds for which it has been connected, or lost."""
    error: str = ""
    address: str = ""
    """Without a password."""


class RoleChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a role carried out by a router."""

    instance: str
    role: str
    """The role that it changes to."""
    why: str
    """``asked`` by a request to the router, or the role to which the controller wished to add an instance."""
    outcome: str
    """``done``, ``refused``, or ``taken_back`` from a router that had gone."""
    took_s: float
    ago_s: float
    text: str = ""
    """The reason, when it was not carried out."""


class RolesView(msgspec.Struct, frozen=True, kw_only=True):
    """State of a router's role controller."""

    mode: str
    """``dry-run`` or ``on``."""
    idle: str = ""
    """Why this router's controller changes nothing, regardless of its wish; empty when it does."""
    wish: str = ""
    """The role that should have one instance more; empty for none."""
    why: str = ""
    gain_s: float = 0.0
    """Seconds by which a request is expected to be answered sooner."""
    expected_s: dict[str, float] = {}
    """Expected seconds of a request, besides its own prefill and transfer, by split (``1P2D``); the present
    one first."""
    due_s: float | None = None
    """In how many seconds the wish is carried out, if it holds."""
    said: str = ""
    """Why the wish is not carried out although it is due."""
    takes_s: float = 0.0
    """Expected seconds of a change, from earlier ones."""
    changes: tuple[RoleChangeView, ...] = ()
    """The last ones, the newest first."""


class Difference(msgspec.Struct, frozen=True):
    """A setting in which two servers differ, and its values; empty where one does not have it."""

    setting: str
    one: str
    other: str


class Incompatible(msgspec.Struct, frozen=True, kw_only=True):
    """Two groups of instances that cannot work together until one of them is started otherwise."""

    what: str
    """``hand-over``: ``instances`` prefill, ``others`` decode, and no request is sent to both. ``sharing``:
    colocated instances of one model, none of which reads the other group's KV."""
    instances: tuple[str, ...]
    """The first ones by name, at most `compatibility.MOST_INSTANCES`."""
    count: int
    """How many there are."""
    others: tuple[str, ...]
    others_count: int
    differences: tuple[Difference, ...]
    """``one``: at ``instances``; ``other``: at ``others``. At most `compatibility.MOST_DIFFERENCES`."""
    why: str
    """All of it in words."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /cluster``: the cluster as this router sees it."""

    router: str
    store: StoreView
    routers: tuple[str, ...]
    """All routers that share this membership, this one included."""
    instances: tuple[InstanceView, ...]
    unusable: str = ""
    """Why no request can be served, in words; empty when one can."""
    roles: RolesView | None = None
    """With ``--role-controller``."""
    incompatible: tuple[Incompatible, ...] = ()
    """Instances that cannot work together although they serve one model; at most
    `compatibility.MOST_FINDINGS`."""


class Instances(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /cluster/instances``."""

    instances: tuple[InstanceView, ...]


def decode(data: bytes, kind: type[T]) -> T:
    """The message that a body holds; an empty body is a message without fields.

    Raises:
        UserError: the body does not hold such a message; the text names the field.
    """
    if len(data) > MAX_BODY_BYTES:
        raise UserError(f"the body has {len(data)} bytes, the limit is {MAX_BODY_BYTES}")
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{kind.__name__}: {_other_protocol(data) or str(error)[:300]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"the body is not JSON: {str(error)[:200]}") from None


class _Spoken(msgspec.Struct, frozen=True):
    """The field that messages of all versions have."""

    protocol: int = PROTOCOL


def _other_protocol(data: bytes) -> str:
    """The error text for a message of another protocol, whatever its other fields; else empty."""
    try:
        spoken = msgspec.json.decode(data, type=_Spoken).protocol
    except msgspec.MsgspecError:
        return ""
    return "" if spoken == PROTOCOL else f"protocol: {other_release(spoken, PROTOCOL)}"


def other_release(theirs: int, ours: int) -> str:
    """Why two members of different releases refuse each other, and what to do."""
    return f"{theirs} is spoken there, {ours} here; run one release on all members"


def encode(message: Any) -> bytes:
    """A message as JSON."""
    return msgspec.json.encode(message)


def instance_path(instance: str, action: str = "") -> str:
    """The path of one instance, or of an action on it."""
    return f"{PATH}/{instance}/{action}" if action else f"{PATH}/{instance}"


def url_of_replica(server: str, dp_rank: int) -> str:
    """The URL of one replica of a server with ``--dp-size`` above 1: each is an instance of its own."""
    return f"{server}#dp{dp_rank}"


def bootstrap_of_replica(server: str, dp_rank: int | None) -> str:
    """``host:port`` where decode finds a prefill server; with ``#dpN``, the ranks of its replica N. The
    first replica has the address of a server without replicas."""
    return url_of_replica(server, dp_rank) if dp_rank else server


def server_of(url: str) -> str:
    """The URL of the server to which an instance belongs."""
    return url.partition("#")[0]


def dp_rank_of(url: str) -> int | None:
    """The rank of a replica among those of its server; None for a server without replicas."""
    found = _REPLICA.fullmatch(url.partition("#")[2])
    return None if found is None else int(found[1])


def url_problem(url: str) -> str | None:
    """Why no instance can be reached at a URL, as the rest of a sentence; ``None`` when one could."""
    if not url.isprintable() or " " in url:
        return "has characters that no URL has"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "is not a URL"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "is not of the form http://host:port"
    if parts.query or parts.username is not None or (parts.fragment and dp_rank_of(url) is None):
        return "has more than host, port and path"
    if url.endswith("/"):
        return "ends with a slash"
    return None


_REPLICA = re.compile(r"dp(0|[1-9][0-9]{0,3})")
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


def _is_tcp(address: str) -> bool:
    found = _TCP.fullmatch(address)
    return found is not None and 0 < int(found[2]) < 65_536
