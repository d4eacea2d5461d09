"""The cost profile of the router, by model and device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from sglang_ext.cost_model import CostModel, load
from sglang_ext.cost_model.estimated import estimated
from sglang_ext.cost_model.model import (
    DEFAULT_KV_BYTES,
    DEFAULT_TRANSFER,
    DefaultExecution,
    default_link,
)
from sglang_ext.cost_model.profile import find
from sglang_ext.errors import ConfigError
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


def cost_model_for(model: str, folder: Path | None = None) -> CostModel:
    """The cost model of the one profile that is kept for a model; defaults where there is none, or several.

    Nothing that instances tell says on which device they run, so that of several profiles none can be chosen.

    Args:
        model: its served name.
        folder: where profiles are kept, instead of the user's.
    """
    kept = find(model, folder=folder)
    if len(kept) == 1:
        chosen = CostModel(load(kept[0]))
        logger.info("calculating with the cost profile of %s", chosen.profile and chosen.profile.identity)
        return chosen
    if kept:
        logger.warning(
            "there are %d cost profiles of %s; name one with --cost-profile: %s",
            len(kept), model, " ".join(str(path) for path in kept),
        )  # fmt: skip
    else:
        logger.info(
            "no cost profile of %s is kept: calculating with defaults, corrected by observations: %s. "
            "`sglang-ext calibrate` measures", model, defaults(),
        )  # fmt: skip
    return CostModel()


def defaults() -> str:
    """The assumed costs of a model without a profile, for the log."""
    speeds = {f"from {tier.title}": default_link(tier) for tier in tiers_below(Tier.HBM)}
    speeds["between instances"] = DEFAULT_TRANSFER
    links = ", ".join(f"{1e-9 / link.per_byte_s:g} GB/s {what}" for what, link in speeds.items())
    fixed, each = DefaultExecution.FIXED_S * 1000, DefaultExecution.PER_TOKEN_S * 1000
    return f"{fixed:g} ms + {each:g} ms per token, {DEFAULT_KV_BYTES >> 10} KiB of KV per token, {links}"
