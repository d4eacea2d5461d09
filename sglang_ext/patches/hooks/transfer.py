"""The transfer backend ``global``, on SGLang's command line, in its enumeration and among its classes.

Change: ``global`` becomes a member of ``TransferBackend`` and a choice of
``--disaggregation-transfer-backend``; ``get_kv_class`` answers for it with the classes of
``patches/adapter/pd/``. Before the command line is made into a server's settings,
``--kv-pd-caching`` chooses which of SGLang's caching flags are set. Before ``init_disaggregation`` our
classes receive the scheduler, whose pool they serve; around ``run_batch`` they send layers while the next are
computed (push by layer). After decode's ``_update_handshake_waiters``, which selects the requests that may
get slots, requests wait while decode's own disk or DRAM loads blocks for them; around its
``_match_prefix_and_lock``, which would count on HiCache for blocks in DRAM, only blocks in HBM count.
Around its ``_required_admission_tokens`` no more is reserved for an answer than it can take. Around
``_commit_transfer_to_req`` and the streamer's ``accept``, log probabilities of the prompt that prefill has
computed become part of decode's answer. After ``on_idle`` a scheduler that only waits for transfers sleeps
until one of them moves, where stock SGLang spins.

Why no extension point serves: ``add_disagg_transfer_backend_choices`` extends the command line only; the
enumeration and the function are closed, and the classes are constructed with pointers instead of the pool.

Can go: when SGLang registers transfer backends by name, as it does caches.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.admission import BACKEND
from sglang_ext.patches.base import Patch, resolve
from sglang_ext.patches.hooks import flags
from sglang_ext.patches.plugin_hooks import Hook, hook_patch
from sglang_ext.patches.process import PROCESS
from sglang_ext.patches.versions import decode_caches_drafts, installed_sglang_version

_MEMBER = "GLOBAL"
_UTILS = "sglang.srt.disaggregation.utils"
_CHOICES = "sglang.srt.arg_groups.choices.DISAGG_TRANSFER_BACKEND_CHOICES"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"


def kv_class(stock: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Around ``get_kv_class``: our classes for our member."""
    if transfer_backend.value != BACKEND or class_type.value == "kvargs":
        return stock(transfer_backend, class_type)
    from sglang_ext.patches.adapter.pd import kv_manager, kv_requests

    return {
        "manager": kv_manager.GlobalKVManager,
        "sender": kv_requests.GlobalKVSender,
        "receiver": kv_requests.GlobalKVReceiver,
        "bootstrap_server": kv_manager.GlobalKVBootstrapServer,
    }[class_type.value]


def choose_caches(_cls: type, args: argparse.Namespace) -> None:
    """Before ``from_cli_args``: map ``--kv-pd-caching`` to SGLang's flags (MemServe, table 4)."""
    if getattr(args, "disaggregation_transfer_backend", None) != BACKEND:
        return
    mode = getattr(args, "disaggregation_mode", "null")
    if mode not in ("prefill", "decode"):
        return
    config = KvConfig.from_user(KvConfig.given(args), os.environ)
    caches = config.pd_caching != "basic" if mode == "prefill" else config.pd_caching in ("2", "3")
    if getattr(args, "enable_pd_role_switch", False):
        if config.pd_caching not in ("2", "3"):
            raise ConfigError(
                "a server that changes its role keeps its cache in both",
                field="--enable-pd-role-switch",
                hint="Choose --kv-pd-caching 2 or 3",
            )
        args.disaggregation_decode_enable_radix_cache = True
        if args.disaggregation_decode_retraction_backup is None:
            args.disaggregation_decode_retraction_backup = "cpu_tensor"
    if not caches:
        if mode == "decode" and config.acked_behind is not None:
            raise ConfigError(
                f"a decode server with --kv-pd-caching {config.pd_caching} makes no answer durable",
                field="--kv-durability",
                hint="Choose --kv-pd-caching 2 or 3, or disk instead of acked",
            )
        if getattr(args, "radix_cache_backend", None) == BACKEND:
            raise ConfigError(
                f"a {mode} server keeps nothing with {config.pd_caching}",
                field="--kv-pd-caching",
                hint=f"Drop --radix-cache-backend {BACKEND}, or choose 2 or 3",
            )
        args.disable_radix_cache = True
    else:
        if mode == "decode":
            _check_drafts(args, config.pd_caching)
        args.radix_cache_backend = BACKEND
    if mode == "decode":
        args.disaggregation_decode_enable_radix_cache = caches
        if args.disaggregation_decode_retraction_backup is None:
            args.disaggregation_decode_retraction_backup = "cpu_tensor"


def _check_drafts(args: argparse.Namespace, caching: str) -> None:
    """Refuse speculative decoding beside decode's cache where SGLang does, with the way out."""
    name, installed = getattr(args, "speculative_algorithm", None), installed_sglang_version()
    if name is not None and not decode_caches_drafts(installed):
        raise ConfigError(
            f"decode servers of SGLang {installed} keep no cache with --speculative-algorithm {name}",
            field="--kv-pd-caching",
            hint=f"Choose basic or 1 instead of {caching}, or SGLang 0.5.23",
        )


def keep_settings(server_args: Any, _cls: type, args: argparse.Namespace) -> None:
    """After ``from_cli_args``: the bootstrap port is opened in this process, and wants the key."""
    if server_args.disaggregation_transfer_backend == BACKEND:
        PROCESS.config = flags.carried_config(server_args, os.environ)


def before_init_disaggregation(scheduler: Any) -> None:
    """Before ``init_disaggregation``: note the scheduler, whose pool our manager will serve, and the
    settings."""
    if scheduler.server_args.disaggregation_transfer_backend == BACKEND:
        PROCESS.config = flags.carried_config(scheduler.server_args, os.environ)
        PROCESS.scheduler = scheduler


def after_idle(_result: None, scheduler: Any) -> None:
    """After ``on_idle``."""
    if scheduler.server_args.disaggregation_transfer_backend == BACKEND:
        from sglang_ext.patches.adapter.pd import kv_hooks

        kv_hooks.idle(scheduler)


def match_and_lock(stock: Any, queue: Any, req: Any) -> Any:
    """Around decode's ``_match_prefix_and_lock``."""
    if queue.transfer_backend.value != BACKEND:
        return stock(queue, req)
    from sglang_ext.patches.adapter.pd import kv_hooks

    return kv_hooks.match_on_decode(stock, queue, req)


def required_for_admission(
    stock: Any, queue: Any, req: Any, allocated_tokens: int, prefix_len: int, retractable_tokens: int
) -> int:
    """Around decode's ``_required_admission_tokens``: the slots that must be free for a prompt.

    SGLang adds ``--num-reserved-decode-tokens`` for an answer of any length, so a prompt that fills the pool
    but for a short answer would wait for ever. No more is added than the answer can take.
    """
    most = req.sampling_params.max_new_tokens
    left = most - len(req.output_ids)
    if queue.transfer_backend.value != BACKEND or left >= queue.num_reserved_decode_tokens:
        required: int = stock(queue, req, allocated_tokens, prefix_len, retractable_tokens)
        return required
    alone: int = queue._rebootstrap_prefill_len(req) - prefix_len + most - retractable_tokens
    least: int = max(allocated_tokens + left, alone)
    return least


def around_commit(stock: Any, queue: Any, decode_req: Any) -> Any:
    """Around decode's ``_commit_transfer_to_req``: log probabilities of the prompt are committed, too."""
    from sglang_ext.patches.adapter.pd import prompt_logprobs

    return prompt_logprobs.commit(stock, queue, decode_req)


def around_accept(stock: Any, accumulator: Any, *, req: Any) -> None:
    """Around the streamer's ``accept``: where SGLang's decode leaves out log probabilities of the prompt, as
    it has none, ours answers with those that prefill has computed."""
    from sglang_ext.patches.adapter.pd import prompt_logprobs

    mode = accumulator.disaggregation_mode
    if mode.value == "decode" and prompt_logprobs.are_due(req):
        accumulator.disaggregation_mode = type(mode)("null")
    try:
        stock(accumulator, req=req)
    finally:
        accumulator.disaggregation_mode = mode


def after_handshakes(_result: None, queue: Any, *_args: Any, **_kwargs: Any) -> None:
    """After decode's ``_update_handshake_waiters``."""
    if queue.transfer_backend.value == BACKEND:
        from sglang_ext.patches.adapter.pd import kv_hooks

        kv_hooks.bring_ahead(queue)


def around_run_batch(stock: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``run_batch``."""
    if scheduler.server_args.disaggregation_transfer_backend != BACKEND:
        return stock(scheduler, batch, *args, **kwargs)
    from sglang_ext.patches.adapter.pd import kv_hooks

    return kv_hooks.run_batch(stock, scheduler, batch, *args, **kwargs)


def add_member() -> None:
    """Make ``global`` a member of the enumeration and a choice of the flag."""
    choices = resolve(_CHOICES)
    if BACKEND not in choices:
        choices.append(BACKEND)
    enumeration = resolve(f"{_UTILS}.TransferBackend")
    if _MEMBER in enumeration.__members__:
        return
    # As EnumType does for the members in the class's body.
    member = object.__new__(enumeration)
    member._name_, member._value_ = _MEMBER, BACKEND
    member.__objclass__, member._sort_order_ = enumeration, len(enumeration.__members__)
    enumeration._member_names_.append(_MEMBER)
    enumeration._member_map_[_MEMBER] = member
    enumeration._value2member_map_[BACKEND] = member


def has_member() -> bool:
    """Whether SGLang finds the member by value and by name, and the command line offers it."""
    enumeration = resolve(f"{_UTILS}.TransferBackend")
    found = enumeration.__members__.get(_MEMBER)
    return found is not None and enumeration(BACKEND) is found and BACKEND in resolve(_CHOICES)


_HOOKS = hook_patch(
    "transfer_backend",
    "the transfer backend 'global': its name, its classes, the scheduler they serve, sleep while they work",
    Hook(f"{_UTILS}.get_kv_class", "around", kv_class),
    Hook("sglang.srt.server_args.ServerArgs.from_cli_args", "before", choose_caches),
    Hook("sglang.srt.server_args.ServerArgs.from_cli_args", "after", keep_settings),
    Hook(f"{_SCHEDULER}.init_disaggregation", "before", before_init_disaggregation),
    Hook(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._match_prefix_and_lock",
        "around",
        match_and_lock,
    ),
    Hook(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._update_handshake_waiters",
        "after",
        after_handshakes,
    ),
    Hook(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._required_admission_tokens",
        "around",
        required_for_admission,
    ),
    Hook(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        "around",
        around_commit,
    ),
    Hook(f"{_STREAMER}._GenerationStreamAccumulator.accept", "around", around_accept),
    Hook(f"{_SCHEDULER}.run_batch", "around", around_run_batch),
    Hook(f"{_SCHEDULER}.on_idle", "after", after_idle),
)


def apply() -> None:
    """The member now, the hooks when SGLang applies them."""
    add_member()
    _HOOKS.apply()


def applied() -> bool:
    """Whether all of it is in place."""
    return has_member() and _HOOKS.applied()


PATCH = Patch(
    _HOOKS.name,
    _HOOKS.summary,
    _HOOKS.scope,
    (
        f"{_UTILS}.TransferBackend",
        *_HOOKS.targets,
    ),
    apply,
    applied,
)
