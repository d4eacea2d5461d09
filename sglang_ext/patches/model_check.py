"""Whether a server of a model with its flags can have the shared cache, without reading weights.

The answer is that of the start (``require_admitted``), on the same command line; the model's config.json is
all that is read of the model.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError, UserError
from sglang_ext.patches import environment
from sglang_ext.patches.adapter.admission import (
    BACKEND,
    FLAG,
    Facts,
    admission,
    unexchanged,
    with_model,
)
from sglang_ext.patches.adapter.families import Column, Family, family_of
from sglang_ext.patches.adapter.support import given_facts, require_admitted
from sglang_ext.patches.cpu import runtime


class Finding(NamedTuple):
    """One line of the answer; ``level`` is that of the doctor: ok, warning or problem."""

    level: str
    subject: str
    text: str
    advice: str = ""


_CACHE, _TRANSFER = "--radix-cache-backend", "--disaggregation-transfer-backend"
_ASKED: tuple[tuple[str, dict[str, Any], tuple[Column, ...]], ...] = (
    ("HBM", {}, ("HBM",)),
    ("DRAM", {"dram": True}, ("DRAM",)),
    ("disk", {"dram": True, "disk": True}, ("disk",)),
    ("fetch", {"dram": True}, ("fetch",)),
    ("hints", {"dram": True}, ("hints",)),
    ("PD", {"caches": False, "transfers": True}, ("PD", "return", "migration")),
    ("speculation", {"speculative_algorithm": "EAGLE"}, ("speculation",)),
)
"""Subject, facts to add to those of the given flags, and columns of the table of families."""


def findings(arguments: Sequence[str]) -> list[Finding]:
    """The answer for a command line of ``sglang-ext serve``, first the whole, then feature by feature.

    Raises:
        SystemExit: the command line is none of SGLang's, as argparse says it.
    """
    words = list(arguments)
    if not any(word.split("=")[0] in (_CACHE, _TRANSFER) for word in words):
        words += [_CACHE, BACKEND]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        args, config = _read(words)
        record, model = _configured(args)
    except (ConfigError, UserError) as error:
        return [Finding("problem", "model", *_advised(str(error)))]
    flags = given_facts(record, config)
    try:
        require_admitted(record, config)
    except ConfigError as error:
        first = Finding("problem", "start", *_advised(str(error)))
    else:
        first = Finding("ok", "start", "admitted: the weights would be loaded next")
    family = _family(model, flags)
    kind = Finding("ok", "family", f"{family.name}, such as {family.members}")
    own = unexchanged(
        adapters=bool(record.enable_lora or record.lora_paths),
        stages=flags.pp_size,
        contexts=flags.attn_cp_size,
    )
    return [first, kind, *(_features(model, flags, family, own) if family.cells else ())]


def _advised(reason: str) -> tuple[str, str]:
    """A reason's first sentence, and its way out."""
    text, _, advice = reason.partition(". ")
    return text, advice


def _read(words: list[str]) -> tuple[argparse.Namespace, KvConfig]:
    """The command line, as the server reads it, with our flags."""
    environment.prepare(os.environ, words)
    if runtime.wanted(words, os.environ):
        runtime.prepare_process(os.environ)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from sglang_ext.patches.hooks.flags import read_flags

    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang-ext doctor", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(words)
    config = read_flags(args, os.environ)
    if config is None:
        raise ConfigError(f"nothing of the shared cache is asked for. Add {FLAG}")
    return args, config


def _configured(args: argparse.Namespace) -> tuple[Any, Any]:
    """SGLang's record of the flags, and its configuration of the model.

    Raises:
        ConfigError: the configuration is not there or cannot be read.
    """
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    names = [field.name for field in record_fields(ServerArgs) if hasattr(args, field.name)]
    try:
        record = ServerArgs(**{name: getattr(args, name) for name in names})
        return record, ModelConfig.from_server_args(record)
    except Exception as error:  # noqa: BLE001 - of SGLang, transformers or the hub: the user has to act
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"the configuration of {args.model_path} cannot be read ({line[:200].rstrip('. ')}). "
            f"Name a folder that has the model's config.json, or a model whose files this machine can load"
        ) from None


def _family(model: Any, flags: Facts) -> Family:
    from sglang.srt.configs.model_config import AttentionArch

    text = model.hf_text_config
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    all_dense = (getattr(text, "first_k_dense_replace", None) or 0) >= text.num_hidden_layers
    return family_of(
        with_model(model, flags),
        latent=model.attention_arch == AttentionArch.MLA,
        experts=not all_dense and any(getattr(text, name, None) for name in experts),
        windows="sliding_attention" in (getattr(text, "layer_types", None) or ()),
        whole_windows=model.disable_hybrid_swa_memory,
        embeds=not model.is_generation,
    )


def _features(model: Any, flags: Facts, family: Family, own: tuple[str, str] | None) -> list[Finding]:
    """own: see `unexchanged`."""
    found = []
    for subject, asked, columns in _ASKED:
        if subject == "fetch" and own is not None:
            text = f"off: KV of {own[0]} is not fetched from other servers"
            found.append(Finding("warning", subject, text, f"Start without {own[1]} to fetch"))
            continue
        reason = admission(model, replace(flags, **{"caches": True, **asked}))
        if reason is not None:
            text, advice = _advised(reason)
            found.append(Finding("warning", subject, f"refused: {text}", advice))
            continue
        kinds = {column: family.cells[column].kind for column in columns if column in family.cells}
        if not kinds:
            found.append(Finding("warning", subject, "not done for models of this family"))
            continue
        proofs = ", ".join(
            kind if column == subject else f"{column} {kind}" for column, kind in kinds.items()
        )
        found.append(Finding("ok", subject, f"served; proof: {proofs}"))
    return found
