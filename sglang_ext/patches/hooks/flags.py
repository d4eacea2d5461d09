"""Our flags on SGLang's command line, and their way to the scheduler processes.

Change: a hook after ``ServerArgs.add_cli_args`` adds a group of our own; a hook after
``ServerArgs.from_cli_args`` validates the user's flags and puts them on the record as a bookkeeping attribute
(leading underscore), which SGLang's pickling carries to every child beside the fields.

Why no extension point serves: ``ServerArgs`` takes fields from its own class only.

Can go: when SGLang gives plugins a place for their configuration.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from sglang_ext.addresses import SystemNetwork, place
from sglang_ext.config import KvConfig, check_block_size
from sglang_ext.errors import ConfigError
from sglang_ext.patches import readiness
from sglang_ext.patches.adapter.admission import BACKEND
from sglang_ext.patches.adapter.support import require_admitted
from sglang_ext.patches.cpu import runtime
from sglang_ext.patches.cpu.draft_attention import require_chains
from sglang_ext.patches.environment import require_short_sockets
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

ATTRIBUTE = "_sglang_ext_kv"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_GROUP = "sglang_ext"
_DESCRIPTION = (
    f"The cluster-wide KV cache, with --radix-cache-backend {BACKEND}. "
    "Each flag can also be set by an environment variable, as --kv-dram-size by SGLANG_EXT_KV_DRAM_SIZE."
)


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """After ``add_cli_args``: our group, and on a CPU the defaults that a CPU needs."""
    KvConfig.add_cli_args(parser.add_argument_group(_GROUP, _DESCRIPTION))
    if runtime.active(os.environ):
        parser.set_defaults(**runtime.FLAG_DEFAULTS)


def read_flags(args: argparse.Namespace, environment: Mapping[str, str]) -> KvConfig | None:
    """The settings that the arguments and the environment make; None without a global backend.

    As in SGLang's own ``from_cli_args``, flags that the namespace lacks keep their defaults.

    Raises:
        ConfigError: naming the flag.
    """
    given = KvConfig.given(args)
    if BACKEND not in (
        getattr(args, "radix_cache_backend", None),
        getattr(args, "disaggregation_transfer_backend", None),
    ):
        if given:
            name = next(flag.name for flag in KvConfig.flags() if flag.field in given)
            raise ConfigError(
                f"needs --radix-cache-backend {BACKEND}", field=name, hint="Add it, or drop the --kv-* flags"
            )
        return None
    config = KvConfig.from_user(given, environment)
    page_size = getattr(args, "page_size", None)
    if page_size is not None:
        check_block_size(config, page_size)
    return config


def carry_flags(server_args: Any, _cls: type, args: argparse.Namespace) -> None:
    """After ``from_cli_args``: validate, and put the settings on the record."""
    if runtime.active(os.environ):
        require_chains(server_args)
    config = read_flags(args, os.environ)
    if config is None:
        return
    readiness.require()
    require_short_sockets(os.environ)
    require_admitted(server_args, config)
    setattr(server_args, ATTRIBUTE, place(config, server_args, SystemNetwork()).values())


def carried_config(server_args: Any, environment: Mapping[str, str]) -> KvConfig:
    """The settings of a server, in any of its processes.

    ``sglang.Engine`` has no command line; there the environment alone speaks.

    Raises:
        ConfigError: when a value cannot work.
        RuntimeError: when the server was started by a command line and its flags did not arrive.
    """
    values = getattr(server_args, ATTRIBUTE, None)
    if values is not None:
        return KvConfig.from_values(values)
    command = getattr(server_args, "_launch_command", None)
    if command is not None and not command.startswith("Engine("):
        raise RuntimeError(
            f"the hook on {_SERVER_ARGS}.from_cli_args did not take in the process that read the command "
            f"line, so the --kv-* flags are lost. Set SGLANG_PLUGINS=sglang_ext to start without others."
        )
    return place(KvConfig.from_user({}, environment), server_args, SystemNetwork())


PATCH = hook_patch(
    "flags",
    "the --kv-* flags on SGLang's command line, carried to every scheduler process",
    Hook(f"{_SERVER_ARGS}.add_cli_args", "after", add_flags),
    Hook(f"{_SERVER_ARGS}.from_cli_args", "after", carry_flags),
)
