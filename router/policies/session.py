"""Session: all requests of a session go to one instance (MemServe, table 6).

What a session caches is found again, what sessions have in common is computed by each instance that meets
it. The instance follows from the session's name and the instances' names alone: routers need not tell each
other, and an instance that leaves moves no session but its own.
"""

from __future__ import annotations

from sglang_ext.router.policies.base import (
    Costs,
    Decision,
    Fleet,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
    load_of,
    matched_tokens,
)
from sglang_ext.router.policies.hashing import rendezvous


def session(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """The session's own instance; a request without a session goes to the least loaded."""
    if prompt.session is None:
        chosen, reason = min(fleet, key=load_of), Reason.NO_SESSION
    else:
        chosen, reason = rendezvous(prompt.session, fleet), Reason.SESSION
    return Decision(chosen.name, reason, matched_tokens(matches, chosen.name))
