"""``sglang-ext estimate``: savings of a shared cache, from a log of requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import orjson

from sglang_ext.cost_model import CostModel
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.flags import COUNT, REQUIRED, SIZE, Flagged, flag, list_flag
from sglang_ext.router.estimate.arrivals import Log
from sglang_ext.router.estimate.estimate import FULL, Estimate, Fleet
from sglang_ext.router.estimate.page import page
from sglang_ext.router.estimate.prompts import Tokens, Units, lines_of
from sglang_ext.router.placing.profiles import NONE, load_named

PROG = "sglang-ext estimate"
FAILED = 2
GIB = 1 << 30
SHOWN = 12
"""Rows of the curve that people are shown."""


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of the command."""

    prog = PROG
    description = (
        "Read requests from a log, and say what a cluster that shares its KV would save: hit shares by size "
        "of the cache, GPU seconds, times to first token, and the settings that matter. The log is what "
        "sglang-ext diverge takes (bodies of OpenAI's or Anthropic's API, OpenAI's batches, LiteLLM's "
        "payloads, SGLang's --log-requests-level 3), a Mooncake trace, or a recording of a router (--record)."
    )
    lists = (list_flag("--tiers", "Memory for KV of each instance.", common=True),)

    file: str = flag(REQUIRED, "The log; - for standard input.", positional=True)
    model_path: str | None = flag(
        None,
        "A folder with the model's tokenizer, chat template and config.json. Without it, lengths of bodies "
        "are in units of 4 bytes.",
        metavar="PATH",
        common=True,
    )
    instances: int = flag(0, "Instances of the fleet. 0: those of a recording, else 1.", COUNT, common=True)
    hbm: int = flag(0, "In GPU memory. 0: that of a recording, else 40GiB.", SIZE, within="--tiers")
    dram: int = flag(0, "In host memory. 0: that of a recording, else 256GiB.", SIZE, within="--tiers")
    disk: int = flag(0, "On disk. 0: that of a recording, else none.", SIZE, within="--tiers")
    kv_bytes: int = flag(
        0,
        "Bytes of KV of a token. 0: by the model's config.json, else 128KiB (Llama-3.1-8B).",
        SIZE,
        within="--tiers",
    )
    cost_profile: str = flag(
        NONE,
        "Times of computing: a file written by sglang-ext calibrate, or none (defaults).",
        metavar="FILE",
    )
    json: str | None = flag(None, "Write the result to this file, as JSON.", metavar="FILE")
    html: str | None = flag(None, "Write a page with the curve to this file.", metavar="FILE")


def kv_bytes_of(path: str) -> int | None:
    """Bytes of KV of a token by a model's ``config.json``; None where it does not say."""
    try:
        config: dict[str, Any] = orjson.loads(Path(path, "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    config = config.get("text_config") or config
    try:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        if rank := config.get("kv_lora_rank"):  # MLA: a latent and its rotary part
            return layers * (int(rank) + int(config.get("qk_rope_head_dim") or 0)) * 2
        size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return layers * int(config.get("num_key_value_heads") or heads) * size * 2 * 2
    except (KeyError, TypeError, ValueError):
        return None


def fleet_of(given: Arguments, log: Log) -> Fleet:
    """The fleet by flags, by a recording, or by defaults."""
    kv_bytes = given.kv_bytes or (kv_bytes_of(given.model_path) if given.model_path else None) or 128 << 10
    unit = kv_bytes * log.block_tokens
    holding = [each for each in log.members.values() if each.role != "decode"] or [*log.members.values()]

    def size(name: str, flag: int, default: int) -> int:
        told = [each.tiers[name].size for each in holding if name in each.tiers]
        return flag or (round(sum(told) / len(told)) * unit if told else 0 if holding else default)

    hbm = size("hbm", given.hbm, 40 * GIB) or 40 * GIB
    dram, disk = size("dram", given.dram, 256 * GIB), size("disk", given.disk, 0)
    return Fleet(
        instances=given.instances or len(holding) or 1, hbm=hbm, dram=dram, disk=disk, kv_bytes=kv_bytes
    )


def report(estimate: Estimate, unit: str) -> Iterator[str]:
    """The lines for people. unit: the name of the lengths."""
    fleet, found = estimate.fleet, estimate.as_json()
    today, ours = found["today"], found["with_sglang_ext"]
    over = f" over {estimate.seconds:,.0f} s" if estimate.timed else ""
    yield f"{estimate.requests:,} requests, {estimate.prompt_tokens:,} {unit} of prompts{over}"
    yield (
        f"{fleet.instances} instances with {_gib(fleet.hbm)} of HBM, {_gib(fleet.dram)} of DRAM and "
        f"{_gib(fleet.disk)} of disk for KV, {fleet.kv_bytes:,} bytes a token"
    )
    if found["measured_hit_share"] is not None:
        yield f"measured: {100 * found['measured_hit_share']:.1f} % of prompts were found cached"
    yield ""
    yield f"{'':34}{'HBM alone, in turn':>20}{'shared cache':>16}"
    yield f"{'prompts found cached':34}{100 * today['hit_share']:>18.1f} %{100 * ours['hit_share']:>14.1f} %"
    for tier in ("hbm", "dram", "disk"):
        one, other = today["hit_share_by_tier"][tier], ours["hit_share_by_tier"][tier]
        yield f"{'  in ' + tier.upper():34}{100 * one:>18.1f} %{100 * other:>14.1f} %"
    one, other = today["prefill_gpu_seconds"], ours["prefill_gpu_seconds"]
    yield f"{'GPU seconds of prefill':34}{one:>20,.1f}{other:>16,.1f}"
    for share in ("p50", "p90"):
        name = f"time to first token, {share} (s)"
        yield f"{name:34}{today['ttft_s'][share]:>20.3f}{ours['ttft_s'][share]:>16.3f}"
    saved = found["gpu_seconds_saved"]
    yield f"saved: {saved:,.1f} GPU seconds ({100 * saved / one if one else 0:.0f} % of prefill)"
    yield f"a cache without a limit would find {100 * found['without_a_limit']:.1f} %"
    yield ""
    yield "settings that matter, in points of hit share:"
    for each in estimate.settings():
        yield f"  {each.points:+6.1f}  {each.setting}: {each.why}"
    yield ""
    yield f"{'KV of an instance':>20}{'in turn':>12}{'by prefix':>12}"
    curve = estimate.curve()
    for size, turn, prefix in curve[:: max(1, len(curve) // SHOWN)]:
        yield f"{_gib(size):>20}{100 * turn:>10.1f} %{100 * prefix:>10.1f} %"
    yield from notes(estimate)
    for why, count in estimate.log.skipped.most_common():
        yield f"passed over {count:,}: {why}"


def notes(estimate: Estimate) -> Iterator[str]:
    """The limits of the figures."""
    if not estimate.ours.cost.calibrated:
        yield "times are of the default cost model: give --cost-profile for those of your device"
    if estimate.busy > FULL:
        share = f"{100 * estimate.busy:.0f} %"
        yield f"without a shared cache, instances are busy {share} of the time: queues grow, add --instances"
    if not estimate.timed:
        yield "the log has no times: times to first token are without queues"
    yield "times to first token are without the steps of running answers; sglang-ext simulate has these"


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Print the report. Returns the exit status."""
    try:
        given = Arguments.parse(arguments, epilog=f"Exit status: 0, or {FAILED} when the log cannot be read.")
        reader = Units() if given.model_path is None else Tokens(given.model_path)
        log = Log(lines_of(given.file), reader)
        cost = load_named(given.cost_profile) or CostModel()
        fleet = fleet_of(given, log)
        cost.kv_bytes_per_token = fleet.kv_bytes
        estimate = Estimate(log, fleet, cost)
        if not estimate.requests:
            why = "".join(f": {reason}" for reason, _ in log.skipped.most_common(1))
            raise ConfigError(f"the log has no request that can be used{why}", field="FILE")
        unit = "units of 4 bytes" if log.kind == "bodies" and given.model_path is None else "tokens"
        for line in report(estimate, unit):
            out.write(line.rstrip() + "\n")
        if given.json is not None:
            _write(given.json, json.dumps(estimate.as_json(), indent=1) + "\n", "--json")
        if given.html is not None:
            _write(given.html, page(estimate, list(report(estimate, unit))), "--html")
    except SglangExtError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return FAILED
    return 0


def _write(path: str, text: str, field: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}", field=field) from error


def _gib(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count else "none"
