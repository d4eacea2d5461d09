"""Settings of a simulation: fleet, load and policy, and changes of them by name (``--what-if``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.errors import ConfigError
from sglang_ext.router.cluster.role_controller import MODES
from sglang_ext.router.dispatch.queueing import queue_policy_named

BLOCK_TOKENS: Final = 16
Amounts = tuple[float, ...]
"""An amount of each tenant, by its number: the last one is that of all further tenants. 0: no limit."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fleet and its load. Sizes of memory are blocks of 16 tokens, of each instance."""

    instances: int = 4
    requests: int = 1000
    seed: int = 0
    policy: str = "auto"
    rate: float = 2.0
    """Requests a second, of each instance on average. With a recorded load, the command takes it in times the
    recorded rate of the fleet; `simulate` sends that load as it is (`Trace.at_rate`)."""
    hbm: int = 2048
    dram: int = 8192
    disk: int = 0
    """0: none."""
    disk_read: float = 3e9
    """Bytes a second of an instance's disk."""
    disk_write: float = 1e9
    prefill: int = 0
    """Instances that only prefill. With them and `decode`, `instances` is the sum of both."""
    decode: int = 0
    """Instances that only decode."""
    pd_caching: int = 1
    """See ``--kv-pd-caching``: 2: decode keeps KV for later requests, too; 3: it gives prefill the KV that
    it has computed."""
    role_controller: str = "off"
    """Whether instances change between prefill and decode, as the router's flags of this name and of the next
    one say: off, dry-run or on."""
    role_dwell_secs: float = 60.0
    role_switch_s: float = 2.0
    """For which a server that changes its role serves in neither, once it is drained."""
    chunk: int = 2048
    """Prompt tokens of a forward pass (``--chunked-prefill-size``)."""
    running: int = 256
    """Requests that an instance generates for at a time (``--max-running-requests``)."""
    ignore_eos: bool = False
    """Requests generate all tokens that they may, and say so: instances leave room for whole answers. Else
    they leave room for a share of the answers."""
    layers: int = 32
    """Of the model: a pass waits for each layer of the KV that is loaded for it by itself."""
    lag_ms: float = 2.0
    """From an event at an instance to the router's index, and from a message of the router to an instance."""
    network: float = 10e9
    """Bytes a second of an instance's network, in each direction."""
    fetch: bool = True
    """Instances fetch KV from each other."""
    for_others: int = 0
    """Blocks of its DRAM that an instance keeps for instances whose DRAM is full (``--kv-dram-size
    for-others``)."""
    spill_above: float = 0.9
    """Share of its DRAM from which an instance is full."""
    spill_blocks: int = 4096
    """Blocks that are kept so for one tenant (``--tenant-limits spill-blocks``)."""
    observed: bool = True
    """Requests of a recording take the times that were observed; off: those of the cost model. The command
    has it on for the recorded fleet only, unless it is named."""
    closed: bool = False
    """Requests of a recorded session come after the answer to the one before, and after the recorded pause;
    off: at the recorded moments."""
    hints: float = 0.0
    """Share of turns that are announced when the turn before has ended."""
    tenants: int = 1
    greedy: float = 1.0
    """Sessions of the mix that the first tenant begins, in times those of each other tenant."""
    requests_per_second: Amounts = (0.0,)
    """Of the tenants' keys, as the fields of a router's key file are named (``--api-keys-file``)."""
    burst: Amounts = (0.0,)
    concurrent: Amounts = (0.0,)
    tokens_per_minute: Amounts = (0.0,)
    priority: Amounts = (0.0,)
    bytes_per_minute: int = 0
    """Of the bodies of one tenant, 4 bytes for each token of a prompt (``--tenant-limits
    bytes-per-minute``). 0: no limit."""
    max_concurrent_requests: int = 0
    """That the router has at a time, as the flag says; 0: no limit."""
    queue_size: int = 1024
    """Of requests that wait in the router, as the flags ``--queue-size``, ``--queue-timeout-secs`` and
    ``--queue-policy`` say. The agents of a crowd wait as long as it takes."""
    queue_timeout_secs: float = 30.0
    queue_policy: str = "priority"
    crowd: float = 0.0
    """Agents in a closed loop (`crowd`), in times what HBM holds, in the place of the mix; 0: the mix."""
    seconds: float = 600.0
    """After which a closed loop ends."""
    pause_s: float = 4.0
    """Median of the times that its tools take."""
    pause_spread: float = 1.2
    """Standard deviation of their logarithms."""
    program_share: float = 0.0
    """See ``--max-concurrent-requests program-share``."""
    learnt_hints: float = 0.0
    """See ``--tenant-limits learnt-hints``."""
    queue_weight: float = 1.0
    """Weight of a second of queueing (policy ``cost``), and of computing."""
    exec_weight: float = 1.5
    cache_threshold: float = 0.3
    """Of ``prompt-tree``, as the router's flags have it."""
    balance_abs: int = 8
    balance_rel: float = 1.5
    balance_cache: float = 4.0
    most_running: int = 0
    """Requests that the router sends an instance at a time (``--max-running-per-instance``)."""
    failures: float = 0.0
    """Of an instance an hour. It is away for `restart_s`, and comes back with nothing but its disk."""
    restart_s: float = 60.0

    @property
    def limits_tenants(self) -> bool:
        """Whether the tenants' keys have limits or priorities."""
        return any(any(getattr(self, name)) for name in OF_KEYS)


OF_KEYS: Final = ("requests_per_second", "burst", "concurrent", "tokens_per_minute", "priority")
"""Settings that are fields of keys, with an amount for each tenant."""
_MULTIPLES: Final = (
    "instances", "requests", "rate", "hbm", "dram", "disk", "disk_read", "disk_write", "chunk", "running",
    "network", "for_others", "queue_weight", "exec_weight", "crowd", *OF_KEYS, "bytes_per_minute",
    "max_concurrent_requests", "queue_size", "queue_timeout_secs", "role_dwell_secs", "role_switch_s",
)  # fmt: skip
NOT_RECORDED: Final = (
    "disk_read", "disk_write", "pd_caching", "running", "layers", "lag_ms", "network", "role_controller",
    "role_dwell_secs", "role_switch_s", "for_others", "spill_above", "spill_blocks", "closed",
)  # fmt: skip
"""Settings of a fleet and its users that a recording lacks: ``--settings`` describes the recorded fleet by
them."""
FREE: Final = ("requests", "seed", "observed")
"""Settings that do not change a fleet."""
OF_THE_MIX: Final = (
    "tenants", "greedy", "crowd", "seconds", "pause_s", "pause_spread", "learnt_hints",
)  # fmt: skip
"""Settings of built-in loads; a recorded one has none of them."""
OF_A_RECORDING: Final = ("observed", "closed")
OF_A_CROWD: Final = ("seconds", "pause_s", "pause_spread", "learnt_hints")
"""Settings of a crowd's agents; without a crowd they change nothing."""
NOT_OF_A_CROWD: Final = ("rate", "greedy", "queue_size", "queue_timeout_secs")
"""Settings of other loads: a crowd sends its turns when its tools have ended, and waits without end."""
FIELD: Final = "--what-if"


def named_in(text: str) -> dict[str, str]:
    """The settings that a list names, and their values, as they are written."""
    parts = (part.partition("=") for part in text.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in parts}


def of_tenant(amounts: Amounts, number: int) -> float:
    """The amount of a tenant."""
    return amounts[min(number, len(amounts) - 1)]


def same_fleet(one: Settings, other: Settings) -> bool:
    """Whether both have one fleet, and one load but for its length."""
    return one == dataclasses.replace(other, **{name: getattr(one, name) for name in FREE})


def changed(settings: Settings, text: str) -> Settings:
    """The settings with changes such as ``instances=12, dram=2x, policy=cost``.

    Raises:
        ConfigError: there is no such setting, or it cannot have the value.
    """
    values: dict[str, Any] = {}
    known: Mapping[str, Any] = dataclasses.asdict(settings)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in known or not equals:
            raise ConfigError(f"{part!r} is not NAME=VALUE with a name of: {', '.join(known)}", field=FIELD)
        values[name] = _value(name, known[name], value)
    found = checked(dataclasses.replace(settings, **values))
    if values.get("instances", found.instances) != found.instances:
        raise ConfigError(
            f"instances are prefill and decode together, {found.instances} here; change those", field=FIELD
        )
    return found


def _value(name: str, before: Any, text: str) -> Any:
    try:
        if isinstance(before, tuple):
            if text.endswith("x"):
                return tuple(amount * float(text[:-1]) for amount in before)
            return tuple(float(amount) for amount in text.split("/"))
        if text.endswith("x") and name in _MULTIPLES:
            return type(before)(before * float(text[:-1]))
        if isinstance(before, bool):
            return {"on": True, "off": False}[text]
        return type(before)(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{name} cannot be {text!r}", field=FIELD) from None


def checked(settings: Settings) -> Settings:
    """The settings, unless one of them is impossible.

    Raises:
        ConfigError: one of them is.
    """
    for name in ("instances", "requests", "rate", "hbm", "dram", "chunk", "running", "layers", "network"):
        if getattr(settings, name) <= 0:
            raise ConfigError(f"{name} must be greater than 0", field=FIELD)
    for name in ("crowd", "program_share", "learnt_hints", "pause_spread"):
        if getattr(settings, name) < 0:
            raise ConfigError(f"{name} is less than 0", field=FIELD)
    if settings.pause_s <= 0 or settings.seconds <= 0:
        raise ConfigError("pause_s and seconds must be greater than 0", field=FIELD)
    for name in ("disk", "disk_read", "disk_write"):
        if getattr(settings, name) < 0 or (settings.disk and not getattr(settings, name)):
            raise ConfigError(f"{name} must be greater than 0", field=FIELD)
    if settings.pd_caching not in (1, 2, 3):
        raise ConfigError("pd_caching is 1, 2 or 3", field=FIELD)
    if not 0 <= settings.for_others <= settings.dram or settings.spill_blocks < 0:
        raise ConfigError(
            "for_others is at most dram, and neither it nor spill_blocks is negative", field=FIELD
        )
    if not 0 < settings.spill_above <= 1:
        raise ConfigError("spill_above must be greater than 0, and at most 1", field=FIELD)
    if settings.for_others and not settings.fetch:
        raise ConfigError(
            "for_others needs fetch=on: blocks are kept for others by fetching them", field=FIELD
        )
    if settings.prefill or settings.decode:
        if settings.prefill < 1 or settings.decode < 1:
            raise ConfigError("prefill and decode need each other", field=FIELD)
        settings = dataclasses.replace(settings, instances=settings.prefill + settings.decode)
    if not 0 <= settings.hints <= 1:
        raise ConfigError(f"hints is a share, not {settings.hints}", field=FIELD)
    _check_roles(settings)
    _check_limits(settings)
    return settings


def _check_roles(settings: Settings) -> None:
    """Refuse a controller of roles where the product has none."""
    if settings.role_controller not in MODES:
        raise ConfigError(f"role_controller is one of {', '.join(MODES)}", field=FIELD)
    if settings.role_dwell_secs <= 0 or settings.role_switch_s < 0:
        raise ConfigError("role_dwell_secs must be greater than 0, role_switch_s at least 0", field=FIELD)
    if settings.role_controller == "off":
        return
    if not settings.prefill:
        raise ConfigError("role_controller needs prefill and decode", field=FIELD)
    if settings.pd_caching < 2:
        raise ConfigError(
            "role_controller needs pd_caching=2 or 3: a server that changes its role keeps its cache in both",
            field=FIELD,
        )


def _check_limits(settings: Settings) -> None:
    """Refuse impossible limits, and those of tenants that are not there."""
    if settings.tenants < 1 or settings.greedy <= 0:
        raise ConfigError("tenants and greedy must be greater than 0", field=FIELD)
    if settings.queue_timeout_secs <= 0:
        raise ConfigError("queue_timeout_secs must be greater than 0", field=FIELD)
    for name in ("bytes_per_minute", "max_concurrent_requests", "queue_size"):
        if getattr(settings, name) < 0:
            raise ConfigError(f"{name} is less than 0", field=FIELD)
    for name in OF_KEYS:
        amounts: Amounts = getattr(settings, name)
        if len(amounts) > settings.tenants:
            raise ConfigError(
                f"{name} has {len(amounts)} amounts for {settings.tenants} tenants", field=FIELD
            )
        whole = name != "requests_per_second"
        if any((each < 0 and name != "priority") or (whole and each % 1) for each in amounts):
            raise ConfigError(f"{name} cannot be {amounts_text(amounts)}", field=FIELD)
    queue_policy_named(settings.queue_policy)


def amounts_text(amounts: Amounts) -> str:
    """Amounts as they are written: ``2/50``."""
    return "/".join(f"{amount:g}" for amount in amounts)
