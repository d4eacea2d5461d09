"""The parts common to all policies, wrapped around each policy's own rule.

- Matches of instances with an untrusted index are left out: load decides about those instances. If no match
  is left, the decision's reason is ``Reason.UNTRUSTED``. If the matches are too short to decide and the
  snapshot of an instance has not arrived, it is ``Reason.INDEX_AWAITED``.
- A policy chooses among the instances that a request is sent to first. For a prefill instance, the decode
  instance is chosen next, by its match with the prompt and by its load.
- A custom policy may fail; requests must not. Its error is logged, and the least loaded instance is chosen.
"""

from __future__ import annotations

import logging
import math

import msgspec

from sglang_ext.router.policies.base import (
    Costs,
    Decision,
    Fleet,
    Instance,
    Matches,
    Policy,
    PolicyOptions,
    Prompt,
    Reason,
    Role,
    WholeFleet,
)
from sglang_ext.router.policies.fleet_queries import (
    all_colocated,
    all_trusted,
    decoders_for,
    first_targets,
    for_want_of,
    load_of,
    matched_tokens,
    named,
)
from sglang_ext.router.policies.plan import Pricing

logger = logging.getLogger("router.policies")


def trusted_matches(fleet: Fleet, matches: Matches) -> Matches:
    """The matches of instances with a trusted index, including indexes whose snapshot has not arrived."""
    if not matches or all_trusted(fleet):
        return matches
    if isinstance(fleet, WholeFleet):  # it may have a thousand instances, of which few hold the prompt
        doubted = {
            name
            for name in matches
            if (found := named(fleet, name)) is not None and not (found.trusted or found.awaited)
        }
        return {name: match for name, match in matches.items() if name not in doubted} if doubted else matches
    doubted = {instance.name for instance in fleet if not (instance.trusted or instance.awaited)}
    return {name: match for name, match in matches.items() if name not in doubted} if doubted else matches


def hand_over_s(
    prompt: Prompt,
    prefill: Instance,
    decode: Instance,
    matches: Matches,
    costs: Costs,
    options: PolicyOptions,
) -> float:
    """Cost in seconds of pairing ``decode`` with ``prefill``: the transfer of the prompt's KV that ``decode``
    lacks, and an answer of ``expected_output`` tokens at its present batch size."""
    lacking = max(0, prompt.tokens - matched_tokens(matches, decode.name))
    return costs.transfer_s(prefill, decode, lacking) + options.expected_output * costs.decode_s(decode)


def choose_decode(
    prompt: Prompt, prefill: Instance, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> tuple[Instance, float]:
    """The decode instance for a request that ``prefill`` computes, and ``hand_over_s`` to it.

    Raises:
        ValueError: no instance of the fleet can decode for ``prefill``.
    """
    decoders = decoders_for(fleet, prefill)
    seconds = {
        instance.name: hand_over_s(prompt, prefill, instance, matches, costs, options)
        for instance in decoders
    }
    chosen = min(
        decoders,
        key=lambda instance: (seconds[instance.name], load_of(instance)),
    )
    return chosen, seconds[chosen.name]


def assembled(rule: Policy) -> Policy:
    """A complete policy from a rule that chooses among colocated or prefill instances."""

    def policy(
        prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
    ) -> Decision:
        known = trusted_matches(fleet, matches)
        candidates = first_targets(fleet)
        decision = rule(prompt, candidates, known, costs, options)
        reason = for_want_of(decision.reason, candidates)
        if reason is not decision.reason:
            decision = msgspec.structs.replace(decision, reason=reason)
        if candidates is fleet:  # all are colocated: no decode instance
            return decision
        return with_decode(decision, prompt, fleet, known, costs, options)

    policy.__doc__ = rule.__doc__
    policy.__name__ = getattr(rule, "__name__", "policy")
    return policy


def without(policy: Policy, names: frozenset[str]) -> Policy:
    """The same policy for the fleet without some instances."""
    if not names:
        return policy

    def among_others(
        prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
    ) -> Decision:
        others = tuple(instance for instance in fleet if instance.name not in names)
        return policy(prompt, others, matches, costs, options)

    return among_others


def with_decode(
    decision: Decision, prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Adds the decode instance to a decision that needs one and has none."""
    if decision.decode is not None or all_colocated(fleet):
        return decision
    chosen = named(fleet, decision.instance)
    if chosen is None or chosen.role is not Role.PREFILL:
        return decision
    decode, _ = choose_decode(prompt, chosen, fleet, matches, costs, options)
    return msgspec.structs.replace(decision, decode=decode.name)


def guarded(policy: Policy, name: str, fallback: Policy) -> Policy:
    """Wraps an untrusted policy: logs its exceptions and checks its decisions.

    Args:
        name: for the log.
        fallback: decides when ``policy`` fails, with ``Reason.POLICY_FAILED``.
    """

    def safe(
        prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
    ) -> Decision:
        try:
            decision = policy(prompt, fleet, matches, costs, options)
            problem = invalid_reason(decision, fleet)
            if problem is None:
                return with_decode(decision, prompt, fleet, trusted_matches(fleet, matches), costs, options)
        except Exception as error:
            logger.error("policy %s failed", name, exc_info=error)
        else:
            logger.error("policy %s: %s", name, problem)
        decision = fallback(prompt, fleet, matches, costs, options)
        return msgspec.structs.replace(decision, reason=Reason.POLICY_FAILED)

    return safe


def invalid_reason(decision: object, fleet: Fleet) -> str | None:
    """Why a decision is invalid; None when it is valid."""
    if not isinstance(decision, Decision):
        return f"it returned {type(decision).__name__} instead of a Decision"
    first = {instance.name for instance in first_targets(fleet)}
    if decision.instance not in first:
        return f"it chose {decision.instance!r}, which is none of {', '.join(sorted(first))}"
    prefill = named(fleet, decision.instance)
    if decision.decode is not None and prefill is not None:
        decoders = {instance.name for instance in decoders_for(fleet, prefill)}
        if decision.decode not in decoders:
            return f"it chose {decision.decode!r} to decode, which is none of {', '.join(sorted(decoders))}"
    names = {instance.name for instance in fleet}
    for fetch in decision.fetch:
        if fetch.source not in names:
            return f"it fetches from {fetch.source!r}, which is none of {', '.join(sorted(names))}"
    pricing: object = decision.pricing
    if pricing is not None and not isinstance(pricing, Pricing):
        return f"its pricing is a {type(pricing).__name__}, not a Pricing"
    reason: object = decision.reason
    if not isinstance(reason, Reason):
        return f"its reason {reason!r} is none of router.policies.Reason"
    if not all(
        isinstance(score, int | float) and not math.isnan(score) for score in decision.scores.values()
    ):
        return f"its scores {dict(decision.scores)!r} are no numbers"
    return None
