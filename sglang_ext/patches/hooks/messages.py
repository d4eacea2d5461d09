"""Let commands for the cache travel with SGLang's requests, so that every rank gets them in the same pass.

Change: four hooks.

- after rank 0 has pulled the messages that arrived: the commands in the command queue
  (``engine/commands.py``) are added, and are broadcast over the ranks with the requests;
- with DP attention, SGLang broadcasts requests over the ranks of a replica, and all else from rank 0 over
  those of the server: a command goes with the requests, before them;
- after the table of request types was made: it learns the type of a command, which goes to the cache;
- before an idle scheduler sleeps: it is set to wake when a command comes.

Why no extension point serves: SGLang's table of request types is closed, and its control requests come from
its own tokenizer process only.

Can go: when a registered cache backend can receive messages.
"""

from __future__ import annotations

import logging
from typing import Any

from zmq.constants import POLLIN

from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch
from sglang_ext.patches.process import PROCESS

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"


def after_pull(requests: list[Any] | None, _receiver: Any) -> None:
    """After ``_pull_raw_reqs``: None on ranks that receive the requests from another rank."""
    if requests is not None and PROCESS.commands is not None:
        # Before the requests: a command that prepares for a request is sent before it.
        from sglang_ext.patches.adapter.command import KvCommand

        requests[:0] = [KvCommand(payload=each.payload, at=each.at) for each in PROCESS.commands.take()]


def after_split(
    result: tuple[list[Any], list[Any]], _receiver: Any, recv_reqs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """After ``_split_work_and_control_reqs``, with DP attention."""
    from sglang_ext.patches.adapter.command import KvCommand

    work, control = result
    commands = [each for each in control if isinstance(each, KvCommand)]
    return [*commands, *work], [each for each in control if not isinstance(each, KvCommand)]


def after_dispatcher(_result: None, scheduler: Any) -> None:
    """After ``init_request_dispatcher``."""
    from sglang.utils import TypeBasedDispatcher

    from sglang_ext.patches.adapter.command import KvCommand

    def handle(command: KvCommand) -> None:
        cache: Any = called_cache(scheduler)
        if cache is None:
            return
        try:
            cache.commands.handle(command.payload, command.at)
        except Exception:
            logger.exception("a command for the KV cache failed")

    scheduler._request_dispatcher += TypeBasedDispatcher([(KvCommand, handle)])


def before_sleep(scheduler: Any) -> None:
    """Before ``maybe_sleep_on_idle``."""
    command_queue = PROCESS.commands
    poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    if command_queue is None or poller is None:
        return
    if PROCESS.polled is not poller:
        poller.register(command_queue.fd, POLLIN)
        PROCESS.polled = poller
    command_queue.slept()


PATCH = hook_patch(
    "commands",
    "commands for the cache travel with SGLang's requests to every rank",
    Hook(f"{_RECEIVER}._pull_raw_reqs", "after", after_pull),
    Hook(f"{_RECEIVER}._split_work_and_control_reqs", "after", after_split),
    Hook(f"{_SCHEDULER}.init_request_dispatcher", "after", after_dispatcher),
    Hook(f"{_SCHEDULER}.maybe_sleep_on_idle", "before", before_sleep),
)
