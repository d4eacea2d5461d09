"""What instances, routers and people say to each other about membership: JSON over HTTP.

An instance says ``POST /cluster/instances`` with a `Registration` and is told `Registered`; saying it again
with the same epoch changes nothing, so an instance repeats it whenever it has heard no router for
``verdict_s``, which is how a router that was restarted finds its instances again. A new epoch is a restart:
what the former one held is forgotten and freed. ``DELETE /cluster/instances/{instance}`` is how it leaves.

People and programs read `Cluster` (``GET /cluster``) and `Instances` (``GET /cluster/instances``), and say
`Drain` and `ChangeRole` to ``POST /cluster/instances/{instance}/drain`` and ``.../role``.

Every field is bounded; what does not fit is refused with the name of the field (`decode`). Requests are
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
"""Whoever is not heard for so long is taken for dead."""

InstanceId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}$")]
"""What an instance calls itself: unique in its cluster, the same after a restart; part of a URL path."""
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
    """Base of what is sent to a router."""


class Registration(Body, frozen=True, kw_only=True):
    """An instance says who it is and how it is reached."""

    url: Url
    """Its HTTP address as the router reaches it: ``http://host:port``."""
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
    """What the KV of this instance must agree in with that of another before it may be moved between them."""
    endpoints: Annotated[tuple[AgentAddress, ...], msgspec.Meta(max_length=256)] = ()
    """``host:port`` of each rank, where peers read its DRAM; none for an instance that does not export."""
    computes: bool = False
    """Whether it computes what nobody holds of an announced prompt (``--kv-advisory-compute``)."""
    splits: bool = False
    """Whether it takes part in computing one prompt with others: it exports layers of what it computes, and
    computes behind layers that still come."""
    for_others: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 0
    """Blocks that it keeps for other instances in DRAM that is idle (``--kv-dram-for-others``)."""
    settings: Settings = {}
    """Of its model, and of its KV's data type: `compatibility.bounded`."""
    handover: Settings = {}
    """Further settings that both halves of a prefill-decode pair must share; empty for an instance without
    our transfer backend."""
    weights: Text = ""
    """Digest of rank 0's weights at the start, where they were read."""
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
    """Which router this is; another one after each start."""
    instance: InstanceId
    state: Text
    """Where the instance is in its life, in this router's eyes."""
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
    """Blocks that a tier holds, and how many fit. spilled: of those held, what is kept for other
    instances."""

    used: int
    size: int
    spilled: int = 0


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """What a router knows of one instance."""

    instance: str
    """Its id; for one that was listed by URL and has not registered, that URL's host and port."""
    url: str
    role: str
    state: str
    why: str
    """Why it is in this state, in words."""
    registered: bool
    """Whether it came by itself; otherwise it was listed with ``--worker-urls``."""
    epoch: str = ""
    agent: str = ""
    model: str = ""
    block_size: int = 0
    tp_size: int = 1
    in_flight: int = 0
    queued_tokens: int = 0
    cached_tokens: int = 0
    trusted: bool = True
    """Whether the index of it is believed, and is all."""
    awaited: bool = False
    """Whether its snapshot is expected and not in yet: what it holds is not known, or in part."""
    usable: bool = False
    """Whether it is given requests now."""
    heard_s: float | None = None
    """Seconds since its last sign of life."""
    draining: Draining | None = None
    elsewhere: tuple[Elsewhere, ...] = ()
    """How the other routers see it."""
    tiers: dict[str, TierFill] = {}
    """How full its tiers are, as its agent says: ``hbm``, ``dram``, ``disk``; none for one that is not heard,
    and no tier that it does not have."""


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """Where membership is kept."""

    kind: str
    """``embedded``, ``local`` or ``redis``."""
    connected: bool = True
    since_s: float = 0.0
    """Seconds for which it has been connected, or lost."""
    error: str = ""
    address: str = ""
    """Without a password."""


class RoleChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a role that a router has seen to."""

    instance: str
    role: str
    """The one that it should have."""
    why: str
    """``asked`` for by somebody, or the role that the controller wished one more of."""
    outcome: str
    """``done``, ``refused``, or ``taken_back`` from a router that had gone."""
    took_s: float
    ago_s: float
    text: str = ""
    """What came in between."""


class RolesView(msgspec.Struct, frozen=True, kw_only=True):
    """What the role controller of a router makes of its cluster."""

    mode: str
    """``dry-run`` or ``on``."""
    idle: str = ""
    """Why this router's controller changes nothing, whatever it wishes; empty when it does."""
    wish: str = ""
    """The role that should have one instance more; empty for none."""
    why: str = ""
    gain_s: float = 0.0
    """What a request is expected to be answered sooner by."""
    expected_s: dict[str, float] = {}
    """Expected seconds of a request, besides its own prefill and transfer, by split (``1P2D``); the present
    one first."""
    due_s: float | None = None
    """In how many seconds the wish is carried out, if it holds."""
    said: str = ""
    """What keeps it from being carried out when it is due."""
    takes_s: float = 0.0
    """What a change is expected to take, by those before."""
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
    """``GET /cluster``: what this router knows of its cluster."""

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
    """The message that a body holds; an empty body is one without fields.

    Raises:
        UserError: it holds none; the text names the field.
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
    """What can be read of a message of any version."""

    protocol: int = PROTOCOL


def _other_protocol(data: bytes) -> str:
    """What to say of a message of another protocol, whatever its other fields; empty for one of ours."""
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
    if parts.query or parts.fragment or parts.username is not None:
        return "has more than host, port and path"
    if url.endswith("/"):
        return "ends with a slash"
    return None


_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")


def _is_tcp(address: str) -> bool:
    found = _TCP.fullmatch(address)
    return found is not None and 0 < int(found[2]) < 65_536
