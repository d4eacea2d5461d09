"""What every policy has in common, around the rule that is its own.

- Matches of instances whose index is not believed are left out: load decides about those. Where that leaves
  no prefix at all, the decision says so (``Reason.UNTRUSTED``). Where too little is known to decide and what
  an instance holds is still awaited, it says that (``Reason.INDEX_AWAITED``).
- A policy chooses among the instances that a request is sent to first. Where the chosen one only prefills,
  the instance that decodes is chosen beside it, by what it holds of the prompt already and by its load.
- A policy of one's own may fail; requests must not. Its error is logged, and the least loaded instance taken.
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
)
from sglang_ext.router.policies.questions import (
    all_colocated,
    all_trusted,
    beginners,
    decoders_for,
    for_want_of,
    load_of,
    matched_tokens,
    named,
)

logger = logging.getLogger("router.policies")


def trusted_matches(fleet: Fleet, matches: Matches) -> Matches:
    """The matches of instances whose index is believed, as far as it has come."""
    if all_trusted(fleet):
        return matches
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
    """Seconds that choosing ``decode`` behind ``prefill`` costs: sending what it lacks of the prompt's KV,
    and an answer of ``expected_output`` tokens beside those that it generates already."""
    lacking = max(0, prompt.tokens - matched_tokens(matches, decode.name))
    return costs.transfer_s(prefill, decode, lacking) + options.expected_output * costs.decode_s(decode)


def choose_decode(
    prompt: Prompt, prefill: Instance, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> tuple[Instance, float]:
    """The instance that decodes what ``prefill`` computes, and ``hand_over_s`` to it.

    Raises:
        ValueError: none of the fleet decodes for ``prefill``.
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
    """The whole policy around a rule that chooses among colocated instances, or those that prefill."""

    def policy(
        prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
    ) -> Decision:
        known = trusted_matches(fleet, matches)
        candidates = beginners(fleet)
        decision = rule(prompt, candidates, known, costs, options)
        reason = for_want_of(decision.reason, candidates)
        if reason is not decision.reason:
            decision = msgspec.structs.replace(decision, reason=reason)
        if candidates is fleet:  # whoever begins with it answers it
            return decision
        return with_decode(decision, prompt, fleet, known, costs, options)

    policy.__doc__ = rule.__doc__
    policy.__name__ = getattr(rule, "__name__", "policy")
    return policy


def with_decode(
    decision: Decision, prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """The decision with the instance that decodes, where it needs one and has none."""
    if decision.decode is not None or all_colocated(fleet):
        return decision
    chosen = named(fleet, decision.instance)
    if chosen is None or chosen.role is not Role.PREFILL:
        return decision
    decode, _ = choose_decode(prompt, chosen, fleet, matches, costs, options)
    return msgspec.structs.replace(decision, decode=decode.name)


def guarded(policy: Policy, name: str, fallback: Policy) -> Policy:
    """A policy of unknown quality: what it raises is logged, and what it decides is checked.

    Args:
        name: for the log.
        fallback: decides where it fails, with ``Reason.POLICY_FAILED``.
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
    """Why a decision cannot be followed; None when it can."""
    if not isinstance(decision, Decision):
        return f"it returned {type(decision).__name__} instead of a Decision"
    first = {instance.name for instance in beginners(fleet)}
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
    reason: object = decision.reason
    if not isinstance(reason, Reason):
        return f"its reason {reason!r} is none of router.policies.Reason"
    if not all(
        isinstance(score, int | float) and not math.isnan(score) for score in decision.scores.values()
    ):
        return f"its scores {dict(decision.scores)!r} are no numbers"
    return None
