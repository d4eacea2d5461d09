"""The router's logs: one line per request, as text or as JSON, with the request's id."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from sglang_ext.router.telemetry.record import Record

access_logger = logging.getLogger("router.access")


def log_access(record: Record, now: float) -> None:
    """Write the line of a request. It never contains keys, prompts or answers."""
    if not access_logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "ms": round((now - record.started) * 1e3, 1),
        "first_byte_ms": _ms(record.first_byte, record.started),
        "added_ms": round(sum(record.stages.values()) * 1e3, 2) if record.stages else None,
        "queued_ms": round(record.queued_s * 1e3, 1) if record.queued_s else None,
        "stream": record.stream or None,
        "tenant": record.caller.tenant,
        "instance": record.instance,
        "prefill": record.prefill_instance,
        "reason": record.reason,
        "prompt": record.prompt_tokens,
        "matched": record.matched_tokens,
        "cached": record.cached_tokens,
        "tiers": record.tiers or None,
        "generated": record.completion_tokens,
        "attempts": record.attempts if record.attempts > 1 else None,
        "error": record.error,
        "trace": record.trace_id,
        "id": record.request_id,
    }
    present = {name: value for name, value in fields.items() if value is not None}
    access_logger.info("request", extra={"fields": present})


def _ms(moment: float | None, since: float) -> float | None:
    return None if moment is None else round((moment - since) * 1e3, 1)


class TextFormatter(logging.Formatter):
    """``time level logger message name=value ...``, always one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        parts = [
            self.formatTime(record, "%Y-%m-%d %H:%M:%S"),
            record.levelname.lower(),
            record.name,
            record.getMessage().replace("\n", "\\n"),
            *(f"{name}={_value(value)}" for name, value in fields.items()),
        ]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _value(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=\n\r\t') else text


def configure_logging(level: str, log_format: str) -> None:
    """Send the router's logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger("router")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
