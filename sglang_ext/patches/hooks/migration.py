"""Let requests be stopped between two tokens, and gone on with where others have stopped them.

Change: five hooks, all for ``patches/adapter/migration/``.

- before ``handle_generate_request``: the state that a request resumes from is taken out of its
  ``custom_params``, before SGLang's batch and logit processors see it;
- before ``_add_request_to_queue``: such a request is given its output ids;
- after decode's ``_commit_transfer_to_req``: the request's state is restored, since its KV is there;
- before ``abort_request``: a stopped request is found, though no queue of SGLang has it;
- around ``is_fully_idle``: memory of stopped requests is no leak, and a scheduler that has some is not idle.

Why no extension point serves: SGLang resumes requests that it has retracted itself, and no others.

Can go: when SGLang moves running requests between servers.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.patches.hooks.scheduler import called_cache
from sglang_ext.patches.plugin_hooks import Hook, hook_patch

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def _migration(scheduler: Any) -> Any:
    cache: Any = called_cache(scheduler)
    return None if cache is None else cache.migration


def before_handle(scheduler: Any, recv_req: Any, **_kwargs: Any) -> None:
    """Before ``handle_generate_request``."""
    if recv_req.sampling_params.custom_params and (migration := _migration(scheduler)) is not None:
        migration.target.received(recv_req)


def before_queue(scheduler: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``_add_request_to_queue``."""
    if (migration := _migration(scheduler)) is not None:
        migration.target.queued(req)


def after_commit(_result: None, queue: Any, decode_req: Any) -> None:
    """After decode's ``_commit_transfer_to_req``."""
    if (migration := _migration(queue.scheduler)) is not None:
        migration.target.committed(decode_req.req)


def before_abort(scheduler: Any, recv_req: Any) -> None:
    """Before ``abort_request``."""
    if (migration := _migration(scheduler)) is not None:
        migration.aborted(recv_req.rid, every=recv_req.abort_all)


def around_idle(stock: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``is_fully_idle``. Running requests answer health checks, so stopped requests do not count for
    them."""
    asks_for_health = kwargs.get("for_health_check", args[0] if args else False)
    migration = None if asks_for_health else _migration(scheduler)
    if migration is not None and migration.source:
        return False
    return stock(scheduler, *args, **kwargs)


PATCH = hook_patch(
    "migration",
    "a running request can be stopped between two tokens, and gone on with at another server",
    Hook(f"{_SCHEDULER}.handle_generate_request", "before", before_handle),
    Hook(f"{_SCHEDULER}._add_request_to_queue", "before", before_queue),
    Hook(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        "after",
        after_commit,
    ),
    Hook(f"{_SCHEDULER}.abort_request", "before", before_abort),
    Hook(f"{_SCHEDULER}.is_fully_idle", "around", around_idle),
)
