"""Repairs of requests before they are admitted, by the rules that are on and the pins of their sessions."""

from __future__ import annotations

from typing import Protocol

import orjson

from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.validation import Json
from sglang_ext.router.clients.repairs import Pin, repair, system_beginnings
from sglang_ext.router.clients.rules import ClientRules, Rule, Where
from sglang_ext.router.clients.sessions import session_of
from sglang_ext.router.http.types import Request
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record


class Pins(Protocol):
    """Remembers the texts with which sessions began."""

    def pin(self, session: str, rule: str, at: int, text: str) -> str:
        """The text that a session had first at a place, which is ``text`` if it had none."""


class Repairs:
    """Repairs requests before they are admitted.

    Args:
        table: the rules; those that are off are left out.
        pins: see ``Action.PIN``.
        metrics: counts requests by rule.
    """

    def __init__(self, table: ClientRules, pins: Pins, metrics: RouterMetrics) -> None:
        self._sessions = table.sessions
        self._rules = tuple(rule for rule in table.rules if rule.on)
        self._at_beginnings = tuple(rule for rule in self._rules if _is_of_beginnings(rule))
        self._marks = frozenset(rule.contains.decode() for rule in self._at_beginnings)
        self._others = tuple(rule for rule in self._rules if not _is_of_beginnings(rule))
        self._pins = pins
        self._repaired = metrics.counter("repaired")

    def apply(
        self, dialect: Dialect, payload: Json, request: Request, record: Record
    ) -> tuple[Json, bytes] | None:
        """The repaired body, as JSON and as bytes; None where there was nothing to repair.

        Args:
            payload: the body, parsed. It is changed.
            record: the repairs are noted in it.
        """
        rules = self._concerning(dialect, request.body, payload, record.caller.tenant)
        if not rules:
            return None
        session = session_of(request.headers, payload, self._sessions)
        done = repair(dialect, payload, rules, self._pin_of(record.caller.scope, session))
        if not done:
            return None
        record.repairs = done
        for each in done:
            self._repaired.labels(each.rule).inc()
        return payload, orjson.dumps(payload)

    def _concerning(self, dialect: Dialect, body: bytes, payload: Json, tenant: str | None) -> list[Rule]:
        found: list[Rule] = []
        # To search a body of 32 KB for a text takes as long as a quarter of all else.
        if self._marks and (beginnings := system_beginnings(dialect, payload)):
            known = {mark for mark in self._marks for text in beginnings if mark in text}
            if known:
                found += [rule for rule in self._at_beginnings if rule.contains.decode() in known]
        for rule in self._others:
            if "tools" in payload if rule.match is None else rule.contains in body:
                found.append(rule)
        if not found:
            return found  # nearly always
        return [
            rule for rule in self._rules if rule in found and (rule.tenants is None or tenant in rule.tenants)
        ]

    def _pin_of(self, scope: str, session: str | None) -> Pin | None:
        if session is None:
            return None
        whole = scope + session
        return lambda rule, at, text: self._pins.pin(whole, rule, at, text)


def _is_of_beginnings(rule: Rule) -> bool:
    return rule.at_start and rule.where is Where.SYSTEM
