"""The reference pages of the documentation, written from the code whenever mkdocs builds it (``mkdocs.yml``).

Flags come from the dataclasses whose fields they are, metrics from the tables of their parts, and the HTTP
API from the router's own OpenAPI description. So none of these pages can be behind the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from sglang_ext.cli import COMMANDS, flags_of
from sglang_ext.engine.metric_table import PD, REQUESTS, cache_table
from sglang_ext.router.endpoints.openapi import description
from sglang_ext.router.telemetry.metric_table import ROUTER

ROOT = Path(__file__).resolve().parent.parent
METRICS = (
    ("Router", ROUTER),
    ("Cache of a server", cache_table()),
    ("PD disaggregation", PD),
    ("Requests at a server", REQUESTS),
)
"""The tables of metrics, with the titles of their sections."""


def cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines) + "\n"


SERVE = """    sglang-ext serve --model-path MODEL --radix-cache-backend global --kv-dram-size 4GiB

The command takes every flag of `python -m sglang.launch_server`, and the flags below. With a GPU, SGLang's
own launcher takes them too. They need `--radix-cache-backend global`. A flag on the command line wins over
its environment variable.
"""


def command_pages() -> Iterator[tuple[str, str]]:
    """A page for each command that has flags of ours: name and text."""
    for name, command in COMMANDS.items():
        flags = flags_of(command)
        if flags is not None:
            intro = flags.description or SERVE
            yield name, f"# `sglang-ext {name}`\n\n{intro}\n\n{flags.markdown()}"


def metrics_page() -> str:
    """Every metric, by the part that publishes it."""
    page = (
        "# Metrics\n\nRouters and servers show Prometheus metrics at `/metrics`. A router with keys asks for "
        "an administrator's key there. A server needs SGLang's `--enable-metrics`.\n"
    )
    for title, metrics in METRICS:
        rows = []
        for name, row in sorted(metrics.exported(), key=lambda each: each[0]):
            labels = ", ".join(f"`{label}`" for label in metrics.labels(row))
            rows.append((f"`{name}`", row.kind, row.unit, labels, cell(row.help)))
        page += f"\n## {title}\n\n" + table(("metric", "kind", "unit", "labels", "meaning"), rows)
    return page


def kind_of(schema: Mapping[str, Any]) -> str:
    """The type of a field, in a word or two."""
    kinds = schema.get("type") or [part.get("type", "any") for part in schema.get("anyOf", [])] or "any"
    words = [kinds] if isinstance(kinds, str) else [str(kind) for kind in dict.fromkeys(map(str, kinds))]
    limits = [f"{sign} {schema[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in schema]
    return " or ".join(words) + (f" ({', '.join(limits)})" if limits else "")


def http_page() -> str:
    """The router's HTTP API."""
    paths = description()["paths"]
    summary, bodies = [], ""
    for path, methods in paths.items():
        for method, operation in methods.items():
            summary.append((f"`{method.upper()} {path}`", cell(operation["summary"])))
            body = operation.get("requestBody")
            if body is None:
                continue
            schema = body["content"]["application/json"]["schema"]
            needed = set(schema.get("required", ()))
            rows = [
                (f"`{name}`", kind_of(field), "yes" if name in needed else "")
                for name, field in schema.get("properties", {}).items()
            ]
            if rows:
                bodies += f"\n## `{path}`\n\n{operation['summary']}.\n\n"
                bodies += table(("field", "type", "required"), rows)
    return (
        "# HTTP API of the router\n\nThis page follows `GET /openapi.json` of the router. The "
        "[router guide](../router.md) says what each endpoint does beyond that, and which headers an answer "
        "carries.\n\n" + table(("endpoint", "what it does"), summary) + bodies
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs' hook: add the generated pages."""
    pages = {"http.md": http_page(), "metrics.md": metrics_page()}
    pages |= {f"{name}.md": page for name, page in command_pages()}
    for name, page in pages.items():
        files.append(File.generated(config, f"reference/{name}", content=page))
    return files
