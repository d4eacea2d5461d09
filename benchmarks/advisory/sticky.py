"""Sticky sessions, as Symphony has InferCept schedule them (section 4): a session's first request goes to the
instance with the fewest requests, all others go where the first one went.

A policy of one's own for the router: ``--policy benchmarks.advisory.sticky:sticky``. Unlike ``session``,
which draws the instance from the session's name, it remembers, and so is as balanced as sticky sessions can
be.
"""

from __future__ import annotations

from sglang_ext.router.policies import Decision, Fleet, Matches, PolicyOptions, Prompt, Reason, first_targets
from sglang_ext.router.policies.base import Costs
from sglang_ext.router.policies.fleet_queries import load_of, matched_tokens

_home: dict[str, str] = {}


def sticky(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """The instance that the session began at."""
    candidates = first_targets(fleet)
    names = {instance.name for instance in candidates}
    home = _home.get(prompt.session or "")
    if home not in names:
        home = min(candidates, key=load_of).name
        if prompt.session is not None:
            _home[prompt.session] = home
    return Decision(home, Reason.SESSION, matched_tokens(matches, home))
