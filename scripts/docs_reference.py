"""The reference pages of the documentation, written from the code whenever mkdocs builds it (``mkdocs.yml``).

Flags come from the parsers, metrics from the objects that publish them, and the HTTP API from the router's
own OpenAPI description. So none of these pages can be behind the code.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import prometheus_client
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from sglang_ext.cli import COMMANDS
from sglang_ext.config import ENVIRONMENT_PREFIX
from sglang_ext.config import flags as cache_flags
from sglang_ext.router.api.openapi import description

ROOT = Path(__file__).resolve().parent.parent
PUBLISHERS = (
    ("Router", "sglang_ext.router.telemetry.observability:RouterMetrics", ()),
    ("Cache of a server", "sglang_ext.engine.cache.metrics:CacheMetrics", (0,)),
    ("PD disaggregation", "sglang_ext.engine.pd.metrics:AgentMetrics", (0,)),
)
"""Who publishes metrics: title, class, and what its constructor takes."""


DEFAULT = re.compile(r" \(default: [^()]*\)$")
"""What help texts say at their end, and the table in a column of its own."""


class _Caught(Exception):
    """A command's parser, on its way out of the command's ``main``."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(module: str) -> argparse.ArgumentParser:
    """The parser that a command's ``main`` would use, without running the command."""

    def caught(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Caught(self)

    main: Callable[[list[str]], int] = import_module(module).main
    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", caught):
        try:
            main([])
        except _Caught as found:
            return found.parser
    raise AssertionError(f"{module}.main parses no arguments")


def cell(text: object) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines) + "\n"


def default_of(value: object) -> str:
    """A default as a user would write it; nothing where there is none."""
    empty = value is None or value is argparse.SUPPRESS or value is False or value in ("", (), [])
    return "" if empty else f"`{cell(value)}`"


def flag_rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Flag, default and meaning of every argument of a parser."""
    formatter = argparse.HelpFormatter(prog=parser.prog)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        if action.choices is not None:
            metavar = "\\|".join(str(choice) for choice in action.choices)
        flag = next((option for option in action.option_strings if option.startswith("--")), None)
        if flag is None:
            name = f"`{action.metavar or action.dest}`"
        else:
            name = f"`{flag}`" + ("" if action.nargs == 0 else f" {metavar}")
        default = default_of(action.default)
        text = cell(formatter._expand_help(action)) if action.help else ""
        yield name, default, DEFAULT.sub("", text) if default else text


def serve_page() -> str:
    """The flags of the shared cache, which SGLang's launcher takes."""
    rows = [
        (
            f"`{flag.name}`" + (f" {flag.metavar}" if flag.metavar else ""),
            f"`{ENVIRONMENT_PREFIX}{flag.field.upper()}`",
            default_of(flag.default),
            cell(flag.help),
        )
        for flag in cache_flags()
    ]
    return (
        "# `sglang-ext serve`\n\n    sglang-ext serve --model-path MODEL --radix-cache-backend global "
        "--kv-dram-size 4GiB\n\nThe command takes every flag of `python -m sglang.launch_server`, and the "
        "flags below. With a GPU, SGLang's own launcher takes them too. They need "
        "`--radix-cache-backend global`. A flag on the command line wins over its environment variable.\n\n"
        + table(("flag", "environment", "default", "meaning"), rows)
    )


def command_pages() -> Iterator[tuple[str, str]]:
    """A page of flags for each command with a parser of its own: name and text."""
    yield "serve", serve_page()
    for name, command in COMMANDS.items():
        if command.replaces_process:
            continue
        parser = parser_of(command.module)
        intro = parser.description or command.help
        page = f"# `sglang-ext {name}`\n\n{' '.join(intro.split())}\n\n"
        yield name, page + table(("flag", "default", "meaning"), list(flag_rows(parser)))


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
    for path in sorted((ROOT / "router").rglob("*.py")):
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
