"""Start the scheduler and detokenizer processes of a CPU server by fork.

Change: SGLang starts its processes by spawn, because CUDA does not survive a fork. Each then imports torch,
transformers and SGLang again: on a CPU that is most of a small server's start, twice over, and the memory of
the modules three times. Without CUDA nothing stands against a fork at the point where SGLang starts them: the
server has imported, parsed its arguments and started no thread. A child gets the default handlers of the
signals for which SGLang's handler ends the whole server, and a torch thread pool of its own. With several
replicas, a process between starts their schedulers from its threads, by spawn.

Why no extension point serves: the start method is fixed in the function.

`SGLANG_EXT_START_METHOD=spawn` keeps SGLang's way.
Can go: when SGLang lets the start method be chosen.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from typing import Any

from sglang_ext.patches.base import Patch, Scope, is_in_place, put_in_place, resolve

START_METHOD = "SGLANG_EXT_START_METHOD"
"""Set to ``spawn`` to start the processes of a CPU server as SGLang does on a GPU."""

_MODULE = "sglang.srt.entrypoints.engine"
_NAME = "fork_children"
_FUNCTION = "_set_envs_and_config"


def possible(metrics: bool) -> bool:
    """Whether this process may be forked, now that SGLang is about to set it up.

    The user did not ask for spawn; no other thread could hold a lock; and with ``metrics``, prometheus_client
    has not been imported: it decides then whether it writes files that all processes share, by an environment
    variable that SGLang is going to set.
    """
    return (
        os.environ.get(START_METHOD, "fork") == "fork"
        and threading.active_count() == 1
        and not (metrics and "prometheus_client" in sys.modules)
    )


def apply() -> None:
    """Wrap the function that sets the start method."""
    if applied():
        return
    module = resolve(_MODULE)
    stock = getattr(module, _FUNCTION)

    @functools.wraps(stock)
    def set_envs_and_config(server_args: Any) -> None:
        fork = possible(server_args.enable_metrics)
        stock(server_args)
        if fork:
            multiprocessing.set_start_method("fork", force=True)
            if server_args.dp_size > 1 or getattr(server_args, "attn_dp_size", 1) > 1:
                multiprocessing.util.register_after_fork(module, _spawn_from_here)
            # Neither the collector nor reference counts of objects that are only read should copy shared
            # pages.
            gc.collect()
            gc.freeze()

    put_in_place(module, _FUNCTION, set_envs_and_config, _NAME)
    multiprocessing.util.register_after_fork(module, _begin_child)


def _begin_child(_module: Any) -> None:
    # A spawned process would have this one; the server's would end the whole process tree.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    renew_thread_pool()


def _spawn_from_here(_module: Any) -> None:
    multiprocessing.set_start_method("spawn", force=True)


def renew_thread_pool(threads: int | None = None) -> None:
    """Give a forked process a thread pool of torch's that works, while it has one thread only.

    torch replaces the pool of its parent, whose threads do not exist here, at its first use, and without a
    lock: of several threads that are the first together - SGLang loads weights with eight - one finds no
    pool, and raises "pool INTERNAL ASSERT FAILED ... Invalid thread pool!".

    Args:
        threads: how many torch is to use from now on; as many as before, if None.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads or torch.get_num_threads())


def applied() -> bool:
    """Whether SGLang calls our wrapper."""
    return is_in_place(resolve(_MODULE), _FUNCTION, _NAME)


PATCH = Patch(
    name=_NAME,
    summary="a CPU server forks its processes, which are ready sooner and share their modules",
    scope=Scope.CPU,
    targets=(f"{_MODULE}.{_FUNCTION}",),
    apply=apply,
    applied=applied,
)
