"""The reference pages of the documentation, written from the code whenever mkdocs builds it (``mkdocs.yml``).

Flags come from the dataclasses whose fields they are, metrics from the objects that publish them, and the
HTTP API from the router's own OpenAPI description. So none of these pages can be behind the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import prometheus_client
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from sglang_ext.cli import COMMANDS, flags_of
from sglang_ext.router.endpoints.openapi import description

ROOT = Path(__file__).resolve().parent.parent
PUBLISHERS = (
    ("Router", "sglang_ext.router.telemetry.observability:RouterMetrics", ()),
    ("Cache of a server", "sglang_ext.engine.cache.metrics:CacheMetrics", (0,)),
    ("PD disaggregation", "sglang_ext.engine.pd.metrics:AgentMetrics", (0,)),
)
"""Who publishes metrics: title, class, and what its constructor takes."""


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


def labels_of(collector: Any) -> str:
    """The label names of a collector, ours or prometheus-client's."""
    names = getattr(collector, "_labelnames", None) or getattr(collector, "labels", ())
    return ", ".join(f"`{name}`" for name in names) if isinstance(names, tuple | list) else ""


def published(path: str, arguments: tuple[object, ...]) -> Iterator[tuple[str, str, str, str]]:
    """Name, kind, labels and meaning of each metric that an object registers."""
    module, _, name = path.partition(":")
    seen: list[Any] = []

    class Recorder(prometheus_client.CollectorRegistry):
        def register(self, collector: Any) -> None:
            seen.append(collector)
            super().register(collector)

    owner = import_module(module)
    patches = [mock.patch.object(prometheus_client, "CollectorRegistry", Recorder)]
    if hasattr(owner, "CollectorRegistry"):
        patches.append(mock.patch.object(owner, "CollectorRegistry", Recorder))
    for patch in patches:
        patch.start()
    try:
        getattr(owner, name)(*arguments)
    finally:
        for patch in patches:
            patch.stop()
    for collector in seen:
        kind = {"LocalCounters": "counter", "LocalHistograms": "histogram"}.get(
            type(collector).__name__, type(collector).__name__.lower()
        )
        full = getattr(collector, "_name", None) or collector.name
        text = getattr(collector, "_documentation", None) or collector._text
        yield f"{full}_total" if kind == "counter" else full, kind, labels_of(collector), text


def registered_elsewhere() -> Iterator[tuple[str, str, str, str]]:
    """The gauges and counters that parts of the router register with its metrics."""
    for path in sorted((ROOT / "sglang_ext" / "router").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("gauge", "counter") or ast.unparse(node.func.value) != "metrics":
                continue
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            if len(words) >= 2:
                suffix = "_total" if node.func.attr == "counter" else ""
                labels = ", ".join(f"`{word}`" for word in words[2:])
                yield f"sglang_ext_router_{words[0]}{suffix}", node.func.attr, labels, str(words[1])


def metrics_page() -> str:
    """Every metric, by who publishes it."""
    page = (
        "# Metrics\n\nRouters and servers show Prometheus metrics at `/metrics`. A router with keys asks for "
        "an administrator's key there. A server needs SGLang's `--enable-metrics`.\n"
    )
    for title, path, arguments in PUBLISHERS:
        found = set(published(path, arguments))
        if title == "Router":
            found |= set(registered_elsewhere())
        rows = [(f"`{name}`", kind, labels, cell(text)) for name, kind, labels, text in sorted(found)]
        page += f"\n## {title}\n\n" + table(("metric", "kind", "labels", "meaning"), rows)
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
