"""The cost profile of the router, by model and device."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from sglang_ext.cost_model import CostModel, load
from sglang_ext.cost_model.estimated import config_of, estimated, rates_of
from sglang_ext.cost_model.model import (
    DEFAULT_KV_BYTES,
    DEFAULT_TRANSFER,
    DefaultExecution,
    default_link,
)
from sglang_ext.cost_model.profile import check, find
from sglang_ext.errors import ConfigError
from sglang_ext.protocol.cluster import Registration
from sglang_ext.tiers import Tier, tiers_below

logger = logging.getLogger("router.profiles")

AUTO = "auto"
NONE = "none"
ESTIMATED = "estimated="
"""Begins a setting ``estimated=DEVICE:FILE``, with the model's ``config.json``."""


def load_named(setting: str) -> CostModel | None:
    """The cost model of ``--cost-profile``, if it names a file.

    Raises:
        ConfigError: the file is no profile, or the costs of its model cannot be estimated.
    """
    if setting.startswith(ESTIMATED):
        device, _, path = setting.removeprefix(ESTIMATED).partition(":")
        return CostModel(estimated(_config_at(Path(path)), device, model=path))
    if setting == NONE:
        logger.info("calculating with defaults: %s", defaults())
    return None if setting in (AUTO, NONE) else CostModel(load(Path(setting)))


def _config_at(path: Path) -> dict[str, Any]:
    """A model's ``config.json``."""
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"cannot read the configuration of a model in {path}: {error}",
            field="--cost-profile",
            hint="Write --cost-profile estimated=DEVICE:PATH, with the path of its config.json",
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no configuration of a model", field="--cost-profile")
    return config


def cost_model_for(
    model: str, instances: Iterable[Registration] = (), folder: Path | None = None
) -> CostModel:
    """The cost model of a model: of the one profile that is kept for it, or for it and the device of an
    instance; else estimated from the device and the model's configuration that an instance reports; else
    defaults.

    Args:
        model: its served name.
        instances: registrations of instances that serve it; stock servers have none. The first known device
            counts, and each instance's correction has its difference from it.
        folder: where profiles are kept, instead of the user's.
    """
    kept = [load(path) for path in find(model, folder=folder)]
    named = [known for known in instances if known.device]
    if len(kept) > 1 and named:
        alike = [(known.device, known.tp_size) for known in named]
        here = [one for one in kept if (one.identity.device, one.identity.tp) in alike]
        kept = here if len(here) == 1 else kept
    if len(kept) == 1:
        logger.info("calculating with the cost profile of %s", kept[0].identity)
        return CostModel(kept[0])
    if kept:
        logger.warning(
            "there are %d cost profiles of %s; name one with --cost-profile: %s",
            len(kept), model, "; ".join(str(one.identity) for one in kept),
        )  # fmt: skip
    for known in named:
        found = _estimated(model, known)
        if found is not None:
            return found
    if not kept:
        logger.info(
            "no cost profile of %s is kept: calculating with defaults, corrected by observations: %s. "
            "`sglang-ext calibrate` measures", model, defaults(),
        )  # fmt: skip
    return CostModel()


def _estimated(model: str, instance: Registration) -> CostModel | None:
    """The estimate from an instance's report; None if its device is of no known class, or the
    configuration of its model lacks a size."""
    if rates_of(instance.device) is None:
        return None
    settings = instance.settings
    try:
        profile = estimated(
            config_of(settings), instance.device,
            model=model, tp=instance.tp_size, kv_type=settings.get("kv_cache_dtype", ""),
        )  # fmt: skip
        check(profile, "the estimate")
    except ConfigError as error:
        logger.info("no costs are estimated for %s of %s: %s", model, instance.instance, error)
        return None
    logger.info(
        "calculating with the costs of %s that are estimated for %s, corrected by observations. "
        "`sglang-ext calibrate` measures", model, instance.device,
    )  # fmt: skip
    return CostModel(profile)


def defaults() -> str:
    """The assumed costs of a model without a profile, for the log."""
    speeds = {f"from {tier.title}": default_link(tier) for tier in tiers_below(Tier.HBM)}
    speeds["between instances"] = DEFAULT_TRANSFER
    links = ", ".join(f"{1e-9 / link.per_byte_s:g} GB/s {what}" for what, link in speeds.items())
    fixed, each = DefaultExecution.FIXED_S * 1000, DefaultExecution.PER_TOKEN_S * 1000
    return f"{fixed:g} ms + {each:g} ms per token, {DEFAULT_KV_BYTES >> 10} KiB of KV per token, {links}"
