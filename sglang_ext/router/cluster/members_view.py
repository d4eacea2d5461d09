"""Views of the members for the cluster API."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_ext.protocol.agent import Beat, Fill
from sglang_ext.protocol.cluster import Cluster, Draining, Elsewhere, InstanceView, RolesView, TierFill
from sglang_ext.router.cluster.members import Members
from sglang_ext.router.cluster.roster import Intent, Member
from sglang_ext.router.fleet.fleet import InstanceRecord
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.router.policies import Instance
from sglang_ext.tiers import Tier, all_tiers


def instances(members: Members) -> tuple[InstanceView, ...]:
    """All present and drained instances; an instance that has left by itself is not included."""
    usable = {instance.name: instance for instance in members.fleet.usable()}
    return tuple(
        instance_view(members, member, usable)
        for member in sorted(members.roster, key=lambda member: member.instance)
        if member.intent is not Intent.GONE
        or (member.url in members.fleet.rows and not members.serves(member.url))
    )


def cluster(members: Members, roles: RolesView | None = None) -> Cluster:
    """The view of the whole cluster. roles: the state of the role controller."""
    return Cluster(
        router=members.router,
        store=members.store.view(),
        routers=tuple(sorted({members.router, *members.store.others})),
        instances=instances(members),
        unusable=members.fleet.obstacle(),
        roles=roles,
        incompatible=members.compatibility.findings,
    )


def instance_view(members: Members, member: Member, usable: Mapping[str, Instance]) -> InstanceView:
    """The view of one member. usable: the instances as policies see them now, by URL."""
    row = members.fleet.rows.get(member.url)
    registration = member.registration
    now = usable.get(member.url)
    elsewhere = tuple(
        Elsewhere(router=name, state=seen.state, in_flight=seen.in_flight)
        for name, status in sorted(members.store.others.items())
        if (seen := status.instances.get(member.instance)) is not None
    )
    return InstanceView(
        instance=member.instance,
        url=member.url,
        role=members.role(member),
        state=(row.state if row else State.LEFT).value,
        why=row.why if row else "it has left",
        registered=registration is not None,
        epoch=member.epoch,
        agent=registration.agent if registration else "",
        model=row.facts.model.name if row and row.facts else registration.model if registration else "",
        block_size=registration.block_size if registration else 0,
        tp_size=registration.tp_size if registration else 1,
        device=registration.device if registration else "",
        in_flight=row.in_flight if row else 0,
        queued_tokens=row.queued_tokens if row else 0,
        cached_tokens=now.cached_tokens if now else 0,
        trusted=now.trusted if now else False,
        awaited=now.awaited if now else False,
        usable=now is not None,
        last_seen_s=round(members.age(member.url), 3) if row and row.last_seen is not None else None,
        draining=_draining(members, member, row),
        elsewhere=elsewhere,
        tiers=tiers(members.links.beat(member.url)),
    )


def tiers(beat: Beat | None) -> dict[str, TierFill]:
    """How full the tiers of an instance are, of those that it has."""
    fills = {} if beat is None else fills_of(beat)
    return {
        tier.name: TierFill(used=fill.used, size=fill.size, spilled=fill.spilled)
        for tier, fill in fills.items()
        if fill.size
    }


def fills_of(beat: Beat) -> dict[Tier, Fill]:
    """A heartbeat's fills of the tiers that this release has, nearest first."""
    reported = {fill.level: fill for fill in beat.fills}
    return {tier: reported[tier.level] for tier in all_tiers() if tier.level in reported}


def _draining(members: Members, member: Member, row: InstanceRecord | None) -> Draining | None:
    if member.intent is not Intent.GO:
        return None
    now = members.clock.monotonic()
    since_s = now - members.drains.get(member.url, now)
    return Draining(
        since_s=round(since_s, 3),
        deadline_s=round(max(0.0, member.deadline_s - since_s), 3),
        in_flight=row.in_flight if row else 0,
    )
