"""Policies with one criterion: the session, the load, the turn, or chance. Prefixes do not count.

Session (MemServe, table 6): a session finds its own KV again; each instance computes the prefixes that its
sessions share. The instance follows from the names alone, so routers need no coordination, and an instance
that leaves moves only its own sessions.
"""

from __future__ import annotations

import hashlib
from typing import Final

from sglang_ext.router.policies.base import (
    Costs,
    Decision,
    Fleet,
    Instance,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
)
from sglang_ext.router.policies.fleet_queries import load_of, matched_tokens

AS_BUSY: Final = 1
"""Instances with requests in flight count as equally busy if they differ by at most this many."""


def session(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """The session's own instance; a request without a session goes to the least loaded."""
    if prompt.session is None:
        chosen, reason = min(fleet, key=load_of), Reason.NO_SESSION
    else:
        chosen, reason = rendezvous(prompt.session, fleet), Reason.SESSION
    return Decision(chosen.name, reason, matched_tokens(matches, chosen.name))


def least_load(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """The fewest requests in flight, then the fewest prompt tokens still to be computed."""
    chosen = min(fleet, key=load_of)
    return Decision(
        chosen.name,
        Reason.LEAST_LOAD,
        matched_tokens(matches, chosen.name),
        {instance.name: -float(instance.in_flight) for instance in fleet},
    )


def round_robin(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Choose in turn. Instances may come and go: a new one is next, the others keep their order."""
    chosen = min(fleet, key=lambda instance: (instance.last_picked, instance.name))
    return Decision(
        chosen.name,
        Reason.ROUND_ROBIN,
        matched_tokens(matches, chosen.name),
        {instance.name: -float(instance.last_picked) for instance in fleet},
    )


def random_choice(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Every instance with the same probability, drawn from the request's id: a retry draws the same."""
    chosen = rendezvous(prompt.request_id, fleet)
    return Decision(chosen.name, Reason.RANDOM, matched_tokens(matches, chosen.name))


def balanced(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """For a request that is announced in a fleet where KV can be moved to any instance before the request
    comes: an idle instance, else one of the least busy. Among busy instances, a difference of one request
    will not last until then; the one with most of the KV is chosen, as moving it costs both ends time."""
    least = min(instance.in_flight for instance in fleet)
    as_busy = least + AS_BUSY if least else 0

    def rank(instance: Instance) -> tuple[object, ...]:
        held = matched_tokens(matches, instance.name)
        return (max(as_busy, instance.in_flight), -held, load_of(instance))

    chosen = min(fleet, key=rank)
    return Decision(chosen.name, Reason.ADVISED, matched_tokens(matches, chosen.name))


def rendezvous(key: str, fleet: Fleet) -> Instance:
    """The instance with the largest hash of (key, name).

    When an instance leaves, only its own keys move, to all others in equal parts; when one comes, it takes
    its share from each of the others, and nothing else moves.
    """
    return max(fleet, key=lambda instance: (weight(key, instance.name), instance.name))


def weight(key: str, name: str) -> bytes:
    """The 8-byte hash by which one instance competes for a key."""
    hashed = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8)
    # The length in between keeps ("ab", "c") and ("a", "bc") apart.
    hashed.update(b"\0" + len(key).to_bytes(8, "little") + name.encode("utf-8", "surrogatepass"))
    return hashed.digest()
