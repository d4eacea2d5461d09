"""The versions of SGLang that the patches were written for and tested with, and which one is installed."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

SGLANG_VERSION: Final = "0.5.23"
"""The version that `make setup` installs."""

ALLOW_UNTESTED: Final = "SGLANG_EXT_UNTESTED_SGLANG"
"""Environment variable: 1 to start with a version that is not listed here, if the contract holds."""

_HERE = Path(__file__).parent


class Status(enum.Enum):
    """How far a version is tested."""

    TESTED = "tested"
    """Every integration test of the short form is green with it, and the tests of all code that touches
    SGLang; with the newest all of the suite."""
    TRIED = "tried, not with the whole test suite"
    """Servers ran with it, and parts of the suite are green; it has to be allowed like the next."""
    WRITTEN = "written for, not tested"
    """Its seam is there and the contract holds; like an untested version, it has to be allowed."""


@dataclass(frozen=True)
class Declared:
    """How a function of SGLang looks in a version: see `contract.source.Found`."""

    signature: str
    source: str


@dataclass(frozen=True)
class Supported:
    """One version of SGLang."""

    version: str
    status: Status
    seam: str
    """The module of ``patches/seams/`` that knows its shapes."""
    hybrids: bool = True
    """Whether its tree for windows and states can be extended (``adapter/hybrid``)."""
    decode_caches_drafts: bool = True
    """Whether its decode servers may keep a cache beside speculative decoding."""

    def hashes(self) -> Mapping[str, Declared]:
        """The functions that patches use, by dotted name, as read when the version was followed."""
        read = json.loads((_HERE / "hashes" / f"{self.version}.json").read_text(encoding="utf-8"))
        return {path: Declared(**each) for path, each in read.items()}

    def routes(self) -> Mapping[str, list[str]]:
        """Path -> methods of each route of its server, as it was read when the version was followed."""
        read: dict[str, list[str]] = json.loads(
            (_HERE / "routes" / f"{self.version}.json").read_text(encoding="utf-8")
        )
        return read


SUPPORTED: Final = (
    Supported("0.5.21", Status.TESTED, "v0_5_21", hybrids=False, decode_caches_drafts=False),
    Supported("0.5.22", Status.TESTED, "v0_5_22", hybrids=False, decode_caches_drafts=False),
    Supported("0.5.23", Status.TESTED, "v0_5_22"),
)


def supported(wanted: str) -> Supported | None:
    """The record of a tested version; None for an untested one."""
    return next((each for each in SUPPORTED if each.version == wanted), None)


def seam_of(wanted: str) -> str:
    """The seam of a version; the newest seam for an untested version."""
    known = supported(wanted)
    return (known or SUPPORTED[-1]).seam


def follows_hybrids(wanted: str) -> bool:
    """Whether models with windows or states are served with a version."""
    return (supported(wanted) or SUPPORTED[-1]).hybrids


def decode_caches_drafts(wanted: str) -> bool:
    """Whether decode servers of a version may keep a cache beside speculative decoding."""
    return (supported(wanted) or SUPPORTED[-1]).decode_caches_drafts


def tested_versions() -> str:
    """The versions tested, for a message."""
    return ", ".join(each.version for each in SUPPORTED if each.status is Status.TESTED)


def installed_sglang_version() -> str:
    """The version of the installed SGLang, or "(not installed)"."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"
