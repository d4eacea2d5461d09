"""The routes of SGLang's HTTP server, read from its source: each needs a row in `sglang_ext.router`.

Decorators of the application and of the routers that it includes are read, and the routes mounted by
functions that receive the application. A path that is named by an environment variable counts by its default.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from sglang_ext.patches.contract.source import Found, Module, Source, statements

_SERVER: Final = "sglang.srt.entrypoints.http_server"
_APP: Final = "app"
_METHODS: Final = frozenset({"get", "post", "put", "delete", "head", "patch", "options"})
_OF_FASTAPI: Final = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
"""Every application of FastAPI has them."""
WEBSOCKET: Final = "WEBSOCKET"
"""Stands among methods for a WebSocket."""


class UnreadableRouteError(ValueError):
    """A route is declared in a way that this reader does not support; the message gives the place."""


def server_routes(source: Source) -> dict[str, list[str]]:
    """Path -> methods of every route of SGLang's server, both in order.

    Args:
        source: of SGLang, one version.

    Raises:
        UnreadableRouteError: the reader has to learn a form.
    """
    module = source.module(_SERVER)
    if module is None:
        raise UnreadableRouteError(f"there is no {_SERVER}")
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in _OF_FASTAPI:
        found[path].add("GET")
    for path, method in _all(source, module):
        found[path].add(method)
    return {path: sorted(found[path]) for path in sorted(found)}


def _all(source: Source, module: Module) -> Iterator[tuple[str, str]]:
    yield from _decorated(module, _APP)
    for call in (node for node in ast.walk(module.tree) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr="include_router") if name == _APP:
                router = source.resolve(module, call.args[0])
                if not isinstance(router, Found) or any(each.arg == "prefix" for each in call.keywords):
                    raise _unreadable(module, call)
                yield from _decorated(router.module, router.path.rpartition(".")[2])
            case ast.Attribute(value=ast.Name(id=name), attr="mount" | "add_api_route") if name == _APP:
                raise _unreadable(module, call)
            case func if any(isinstance(each, ast.Name) and each.id == _APP for each in call.args):
                helper = source.resolve(module, func)
                if isinstance(helper, Found):
                    yield from _mounted(helper)


def _decorated(module: Module, on: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for each in node.decorator_list:
            match each:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if name == on:
                    methods = _methods(module, each, attr)
                    path = _path(module, each) if methods else None
                    if path is not None:
                        for method in methods:
                            yield path, method


def _methods(module: Module, call: ast.Call, attr: str) -> list[str]:
    if attr in _METHODS:
        return [attr.upper()]
    if attr == "websocket":
        return [WEBSOCKET]
    if attr != "api_route":
        return []  # an exception handler, a middleware
    for each in call.keywords:
        if each.arg == "methods":
            return [str(method) for method in ast.literal_eval(each.value)]
    raise _unreadable(module, call)


def _path(module: Module, call: ast.Call) -> str | None:
    """Where a decorator puts its function; None where only an environment variable says."""
    match call.args[:1]:
        case [ast.Constant(value=str(path))]:
            return path
        case [ast.Call(func=ast.Attribute(attr="get"), args=[_, ast.Constant(value=str(default))])]:
            return default
        case [ast.Name(id=name)]:
            for node in statements(module.tree.body):
                match node:
                    case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(args=[ast.Constant()])):
                        if target == name:
                            return None
    raise _unreadable(module, call)


def _mounted(helper: Found) -> Iterator[tuple[str, str]]:
    for node in ast.walk(helper.node):
        match node:
            case ast.Call(func=ast.Name(id="Mount"), args=[ast.Constant(value=str(path)), *_]):
                yield path, "GET"


def _unreadable(module: Module, node: ast.expr) -> UnreadableRouteError:
    return UnreadableRouteError(f"{module.path}:{node.lineno}: {ast.unparse(node)[:200]}")
