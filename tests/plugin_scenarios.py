"""Scenarios in a fresh process that loads the plugin; test_plugin.py runs ``plugin_scenarios.py NAME...``.

SGLang loads plugins once per process and changes classes in place, so each scenario needs a process of its
own. SGLang is imported once, which takes most of the time, and each scenario is a fork of that process.
Prints a line of JSON: scenario -> its result, or {"exit": message} when it ended its process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import io
import json
import os
import pickle
import sys
from typing import Any

from sglang_ext.patches.cpu import runtime

GLOBAL = ["--model-path", "none", "--radix-cache-backend", "global"]


def load(on_cpu_runtime: bool = True) -> None:
    """As SGLang's launcher does. Without the CPU runtime: as on a host where SGLang runs by itself."""
    runtime.prepare_process(os.environ)
    if not on_cpu_runtime:
        del os.environ[runtime.ACTIVE]
    from sglang.srt.plugins import load_plugins

    load_plugins()


def break_hook(name: str) -> None:
    """Have SGLang fail to apply the hooks of one target, which it logs and swallows."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    stock = HookRegistry._apply_target.__func__

    def failing(cls: type, target: str, hooks: list[Any]) -> None:
        if target.endswith(name):
            raise RuntimeError("fault placed by the test")
        stock(cls, target, hooks)

    HookRegistry._apply_target = classmethod(failing)


def outdate(patch_name: str) -> None:
    """Have another source declared for a patch's first target than is installed."""
    from sglang_ext.patches.registry import PATCHES
    from sglang_ext.patches.versions import Supported

    (path, *_) = next(patch.targets for patch in PATCHES if patch.name == patch_name)
    stock = Supported.hashes

    def hashes(self: Supported) -> dict[str, Any]:
        read = dict(stock(self))
        return read | {path: dataclasses.replace(read[path], source="0" * 12)}

    Supported.hashes = hashes


def untested(allowed: str) -> dict[str, Any]:
    """An untested version of SGLang that has everything needed."""
    from sglang_ext.patches import registry

    os.environ[registry.ALLOW_UNTESTED] = allowed
    registry.installed_sglang_version = lambda: "9.9.9"
    load()
    from sglang_ext.patches import readiness

    readiness.require()
    return {"still": "running"}


def untested_version() -> dict[str, Any]:
    """It is refused."""
    return untested("")


def untested_version_allowed() -> dict[str, Any]:
    """It starts when the user says so."""
    return untested("1")


def refusal(act: Any) -> str:
    """The message with which something is refused, or '' when it is not."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 (the message is the result)
        return f"{type(error).__name__}: {error}"
    return ""


def help_text() -> str:
    """The output of ``--help``."""
    from sglang.srt.server_args import prepare_server_args

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        prepare_server_args(["--help"])
    return printed.getvalue()


def taken() -> dict[str, Any]:
    """Everything took: in the process that reads the command line, and after the way to a child."""
    load()
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends
    from sglang.srt.server_args import prepare_server_args

    from sglang_ext.patches import readiness
    from sglang_ext.patches.hooks.flags import carried_config
    from sglang_ext.patches.registry import PATCHES

    readiness.require()
    given = prepare_server_args([*GLOBAL, "--kv-dram-size", "3MB", "--page-size", "8"])
    carried = carried_config(pickle.loads(pickle.dumps(given)), {})
    stock = prepare_server_args(["--model-path", "none"])
    return {
        "help": help_text(),
        "backends": registered_radix_cache_backends(),
        "patches": {patch.name: patch.applied() for patch in PATCHES},
        "carried": carried.values(),
        "device": given.device,
        "stock has ours": hasattr(stock, "_sglang_ext_kv"),
        "stock backend": stock.radix_cache_backend,
    }


def broken_hook() -> dict[str, Any]:
    """SGLang could not apply one hook: servers that need our backend are refused, and no others."""
    runtime.prepare_process(os.environ)
    break_hook("_get_new_batch_prefill_raw")
    load(on_cpu_runtime=False)
    from sglang.srt.mem_cache.registry import get_radix_cache_factory
    from sglang.srt.server_args import prepare_server_args

    from sglang_ext.patches import readiness

    factory = get_radix_cache_factory("global")
    return {
        "launcher": refusal(readiness.require),
        "scheduler": refusal(lambda: factory(object())),
        "command line": refusal(lambda: prepare_server_args(GLOBAL)),
        "stock": refusal(lambda: prepare_server_args(["--model-path", "none"])),
    }


def outdated_hook() -> dict[str, Any]:
    """SGLang was upgraded under a hook: it is not applied, and our backend is refused."""
    runtime.prepare_process(os.environ)
    outdate("scheduler_calls")
    load(on_cpu_runtime=False)
    from sglang.srt.beam_search.coordinator import BeamCoordinator
    from sglang.srt.server_args import prepare_server_args

    return {
        "global": refusal(lambda: prepare_server_args(GLOBAL)),
        "stock": refusal(lambda: prepare_server_args(["--model-path", "none"])),
        "hooked": hasattr(BeamCoordinator.validate_and_init, "__wrapped__"),
    }


def outdated_cpu_patch() -> dict[str, Any]:
    """SGLang was upgraded under a patch of the CPU runtime: loading the plugin ends the process."""
    runtime.prepare_process(os.environ)
    outdate("paged_allocator")
    load()
    return {"still": "running"}


def unloadable() -> dict[str, Any]:
    """A module of ours cannot be imported: the last line of the process when it refuses the command line."""
    sys.modules["sglang_ext.patches.registration"] = None  # type: ignore[assignment]
    runtime.prepare_process(os.environ)
    load(on_cpu_runtime=False)
    from sglang.srt.server_args import prepare_server_args

    from sglang_ext.patches import readiness

    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        with contextlib.suppress(SystemExit):
            prepare_server_args(["--model-path", "none", "--kv-dram-size", "3MB"])
        refused = printed.getvalue()
        atexit._run_exitfuncs()
    return {
        "refused": refused.splitlines()[-1],
        "last": printed.getvalue().splitlines()[-1],
        "launcher": refusal(readiness.require),
    }


def excluded() -> dict[str, Any]:
    """SGLANG_PLUGINS leaves the plugin out: SGLang does not know the backend."""
    os.environ["SGLANG_PLUGINS"] = "another"
    load()
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends

    return {"backends": registered_radix_cache_backends()}


def forked(scenario: Any) -> Any:
    """The result of a scenario, run in a fork of this process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = scenario()
        except SystemExit as error:
            found = {"exit": str(error.code)}
        except BaseException as error:  # noqa: BLE001 (the fork must not run the parent's code)
            found = {"failed": repr(error)}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def main(names: list[str]) -> None:
    """Run scenarios by name and print the result of each."""
    runtime.prepare_process(os.environ)
    import sglang.srt.managers.scheduler  # noqa: F401

    print(json.dumps({name: forked(globals()[name]) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
