"""The parts of a cluster: its members, the state that routers share, and the roles of instances."""

from __future__ import annotations

from sglang_ext.router.app.foundation import Foundation
from sglang_ext.router.app.instance_parts import InstanceParts
from sglang_ext.router.app.request_parts import RequestParts
from sglang_ext.router.app.routing_parts import RoutingParts
from sglang_ext.router.cluster.joins import Joins
from sglang_ext.router.cluster.members import Members
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.router.cluster.role_controller import RoleController
from sglang_ext.router.cluster.setup import open_membership


class ClusterParts:
    """Membership, and the parts that follow its changes.

    Args:
        routing: gets the documents of other routers, and forgets instances that went away.
        requests: gets the sessions of other routers, and moves requests off an instance that drains.
    """

    def __init__(
        self, base: Foundation, of: InstanceParts, routing: RoutingParts, requests: RequestParts
    ) -> None:
        config, clock = base.config, base.clock
        store = open_membership(
            config.cluster,
            config.cluster_name,
            config.cluster_password_file,
            base.name,
            clock,
            base.cluster_key,
            base.rounds,
        )
        self.members = Members(
            of.fleet,
            of.watch,
            store,
            clock,
            channel=base.channel,
            links=of.agents,
            homes=requests.homes,
            documents=routing.documents,
            on_drain=requests.mover.empty,
        )
        joins = Joins(of.fleet.rows, of.agents, clock, router=base.name)
        of.fleet.happened.subscribe(lambda *_: joins.announce())
        of.agents.reached.subscribe(lambda _: joins.announce())
        self.members.ticked.subscribe(joins.announce)
        self.role_changes = RoleChanges(self.members, of.api)
        self.roles = RoleController(
            config.role_controller,
            config.role_dwell_secs,
            self.members,
            self.role_changes,
            of.costs,
            of.trees.tokens_of,
        )
        _follow(of, routing)


def _follow(of: InstanceParts, routing: RoutingParts) -> None:
    """Have the parts follow instances that are reached again, restart or leave."""
    of.agents.reached.subscribe(of.adoption.on_reached)
    of.agents.reached.subscribe(routing.documents.again)
    of.agents.reached.subscribe(routing.advisor.preparer.resend_unanswered)
    of.agents.reached.subscribe(routing.fetching.forget)  # its messages on a former channel may be lost
    # A restarted or departed instance has lost its cache and its measured speed.
    for forget in (
        of.trees.forget, of.costs.forget, routing.fetching.forget, routing.spilling.forget,
        routing.documents.again,
    ):  # fmt: skip
        of.fleet.restarted.subscribe(forget)
