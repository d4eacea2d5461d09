"""Profiles: measured costs of a model on a device, as a readable JSON file.

One file per (model, device, dtype, TP, PP), in ``$SGLANG_EXT_PROFILE_DIR`` or
``$XDG_CACHE_HOME/sglang_ext/profiles``. A file of another schema, with a field that is missing, unknown or
impossible, is refused with the field's name; nothing is guessed.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from sglang_ext.cost_model.levels import FEATURES, ArchLevel, OperatorLevel
from sglang_ext.cost_model.operators import Link, Part
from sglang_ext.errors import ConfigError
from sglang_ext.tiers import Tier, tiers_below

logger = logging.getLogger(__name__)

SCHEMA = 2
DIRECTORY_VARIABLE = "SGLANG_EXT_PROFILE_DIR"
FIELD = "--cost-profile"
MAX_BYTES = 1 << 20
"""Of a profile file; a real one has a few KiB."""

_MAY_BE_NEGATIVE = frozenset({"a", "e"})
"""Coefficients of attention: cached tokens need not be computed."""


class Decode(Part, frozen=True):
    """One step of generation, by the requests of the batch and the tokens of their contexts.

    Between two measured batches, seconds change linearly with the requests. On a GPU the first ones take
    nearly the same time; on a CPU the second may add as much as the first, and three requests take longer
    than four, by the kernels for so few rows.
    """

    requests: tuple[int, ...]
    """Of each measured batch, ascending; at least two, the first of one request."""
    steps_s: tuple[float, ...]
    """Seconds of a step of each, contexts left out."""
    per_token_s: float = 0.0
    """To read the KV of one token of a request's context."""
    late: bool = False
    """A token leaves the server when the next step or pass has run: SGLang's overlapping scheduler launches
    that before it looks at results, and on a CPU a launch returns with the result."""

    @classmethod
    def linear(
        cls, fixed_s: float, per_request_s: float, per_token_s: float = 0.0, *, late: bool = False
    ) -> Self:
        """Each request of a batch takes as long as another one."""
        return cls((1, 2), (fixed_s + per_request_s, fixed_s + 2 * per_request_s), per_token_s, late)

    def seconds(self, requests: int) -> float:
        """Of a step of at least one request, contexts left out."""
        sizes, steps_s = self.requests, self.steps_s
        if requests > sizes[-1]:
            return steps_s[-1] + self.per_request_s * (requests - sizes[-1])
        place = bisect.bisect_left(sizes, requests)
        if sizes[place] == requests:
            return steps_s[place]
        share = (sizes[place] - requests) / (sizes[place] - sizes[place - 1])
        return share * steps_s[place - 1] + (1 - share) * steps_s[place]

    @property
    def per_request_s(self) -> float:
        """That a request adds to a batch, on average; and to larger ones than were measured."""
        return max(0.0, self.steps_s[-1] - self.steps_s[0]) / (self.requests[-1] - self.requests[0])

    def times(self, factor: float) -> Self:
        """On a device that takes so many times as long."""
        return msgspec.structs.replace(
            self,
            steps_s=tuple(factor * seconds for seconds in self.steps_s),
            per_token_s=factor * self.per_token_s,
        )


class Identity(Part, frozen=True):
    """The model, device, dtype and parallelism that a profile belongs to."""

    model: str
    """The served model's name."""
    device: str
    dtype: str
    tp: int = 1
    pp: int = 1

    def file_name(self) -> str:
        """Readable, and another one for every identity."""
        readable = "-".join(
            re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_.")[-40:]
            for part in (self.model, self.device, self.dtype)
        )
        digest = hashlib.blake2b(msgspec.json.encode(self), digest_size=5).hexdigest()
        return f"{readable}-tp{self.tp}-pp{self.pp}-{digest}.json"

    def __str__(self) -> str:
        return f"{self.model} on {self.device}, {self.dtype}, TP {self.tp}, PP {self.pp}"


class Quality(Part, frozen=True):
    """Mean relative errors of the fits on their own measurements."""

    samples: int
    arch_mean_error: float
    operator_mean_error: float | None = None


class Profile(Part, frozen=True):
    """All measured costs of one model on one device."""

    schema: int
    identity: Identity
    arch: ArchLevel
    quality: Quality
    longest_prompt: int
    """Tokens of the longest prompt measured; beyond it, times are extrapolated."""
    kv_bytes_per_token: int
    """All layers and ranks together."""
    operators: OperatorLevel | None = None
    """Missing where the operators could not be measured (an instance on another machine)."""
    decode: Decode | None = None
    tiers: Mapping[str, Link] = {}
    """By name of the tier: to HBM."""
    transfer: Link | None = None
    """From another instance."""
    estimated: bool = False
    """Nothing was measured: see ``estimated``."""
    measured_at: str = ""
    notes: tuple[str, ...] = ()

    @property
    def level(self) -> OperatorLevel | ArchLevel:
        """exec(x, y): of the operators where they are known."""
        return self.operators or self.arch


def directory() -> Path:
    """Where profiles are kept."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "sglang_ext" / "profiles"


def save(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile; returns where. A reader never sees half of it.

    Args:
        path: a file; without it, the profile's own name in ``directory()``.

    Raises:
        ConfigError: it cannot be written there.
    """
    check(profile, "the profile to be saved")
    target = path or directory() / profile.identity.file_name()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "wb", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            try:
                file.write(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}: {error.strerror or error}",
            field="--profile",
            hint="Name a file that can be written",
        ) from error
    return target


def load(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: it cannot be read, is of another schema, or holds something impossible; names the field.
    """
    again = "Measure it again: sglang-ext calibrate"
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise ConfigError(
            f"cannot read the cost profile {path}: {error.strerror or error}", field=FIELD, hint=again
        ) from error
    if size > MAX_BYTES:
        raise ConfigError(f"{path} has {size} bytes; it is no cost profile", field=FIELD, hint=again)
    return parse(data, str(path))


def parse(data: bytes, where: str) -> Profile:
    """A profile from its JSON.

    Args:
        where: it is from, for errors.

    Raises:
        ConfigError: it is none, of another schema, or holds something impossible; names the field.
    """
    again = "Measure it again: sglang-ext calibrate"
    try:
        head = msgspec.json.decode(data)
        schema = head.get("schema") if isinstance(head, dict) else None
        if schema != SCHEMA:
            raise ConfigError(
                f"{where} is a profile of schema {schema!r}, this version reads {SCHEMA}",
                field=FIELD,
                hint=again,
            )
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where} is no cost profile: {error}", field=FIELD, hint=again) from error
    check(profile, where)
    return profile


def find(model: str, *, tp: int | None = None, folder: Path | None = None) -> list[Path]:
    """The kept profiles of a model, the newest first. A file that is none is left out, with a warning."""
    found = []
    for path in sorted((folder or directory()).glob("*.json")):
        try:
            profile = load(path)
        except ConfigError as error:
            logger.warning("a kept cost profile is left out: %s", error)
            continue
        if profile.identity.model == model and tp in (None, profile.identity.tp):
            found.append((profile.measured_at, path))
    return [path for _, path in sorted(found, reverse=True)]


def check(profile: Profile, where: str) -> None:
    """Verify that a profile can be calculated with.

    Raises:
        ConfigError: names the field that cannot be.
    """

    def refuse(field: str, why: str) -> None:
        raise ConfigError(
            f"{where}: {field} {why}", field=FIELD, hint="Measure it again: sglang-ext calibrate"
        )

    for field, value in _numbers(msgspec.to_builtins(profile), ""):
        name = field.rpartition(".")[2]
        if not math.isfinite(value):
            refuse(field, f"is {value}")
        if value < 0 and name not in _MAY_BE_NEGATIVE:
            refuse(field, f"is {value}, and must not be negative")
    if len(profile.arch.coefficients) != FEATURES:
        refuse("arch.coefficients", f"has {len(profile.arch.coefficients)} numbers instead of {FEATURES}")
    for name, positive in (
        ("identity.tp", profile.identity.tp),
        ("identity.pp", profile.identity.pp),
        ("longest_prompt", profile.longest_prompt),
        ("kv_bytes_per_token", profile.kv_bytes_per_token),
        ("arch.divided_by", profile.arch.divided_by),
    ):
        if positive <= 0:
            refuse(name, f"is {positive}, and must be positive")
    for name, level in (("arch", profile.arch), ("operators", profile.operators)):
        for ranks, scaling in level.scalings.items() if level is not None else ():
            if scaling.factor <= 0:
                refuse(f"{name}.scalings.{ranks}.factor", f"is {scaling.factor}, and must be positive")
    known = [tier.name for tier in tiers_below(Tier.HBM)]
    if unknown := set(profile.tiers).difference(known):
        refuse("tiers", f"names {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if profile.decode is not None:
        _check_decode(profile.decode, refuse)
    if profile.operators is not None:
        _check_operators(profile.operators, refuse)


def _check_decode(decode: Decode, refuse: Any) -> None:
    sizes, steps_s = decode.requests, decode.steps_s
    if len(sizes) != len(steps_s) or len(sizes) < 2 or sizes[0] != 1:
        refuse("decode.requests", f"has batches of {sizes} requests for {len(steps_s)} times; the first is 1")
    if any(a >= b for a, b in itertools.pairwise(sizes)):
        refuse("decode.requests", f"is {sizes}, and must ascend")


def _check_operators(level: OperatorLevel, refuse: Any) -> None:
    waves, attention = level.waves, level.attention
    for name, positive in (
        ("waves.units", waves.units),
        ("waves.tile_rows", waves.tile_rows),
        ("waves.tile_columns", waves.tile_columns),
        ("waves.flops_per_s", waves.flops_per_s),
        ("tp", level.tp),
        ("pp", level.pp),
        ("layers", level.layers),
    ):
        if positive <= 0:
            refuse(f"operators.{name}", f"is {positive}, and must be positive")
    for number, linear in enumerate(level.linears):
        if min(linear.inner, linear.columns, linear.count) <= 0:
            refuse(f"operators.linears[{number}]", f"is {linear}, and its sizes must be positive")
    # More cached tokens must not cost more, and all of them not less than nothing.
    if attention.e > 0 or attention.a > 0 or attention.a + attention.b + attention.e < -1e-9 * attention.b:
        refuse("operators.attention", f"{attention} takes less than nothing for a prompt that is cached")
    if level.tp > 1 and str(level.tp) not in level.reductions:
        refuse("operators.reductions", f"lacks {level.tp} ranks")


def _numbers(value: object, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)
