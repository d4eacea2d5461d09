"""``python -m sglang_ext.patches``: whether the patches fit SGLang, the installed one or any other.

Reads source only: nothing of SGLang is imported, and torch is not needed. A version that is not installed is
fetched by pip and kept. Exit status 1 when something does not fit.
"""

from __future__ import annotations

import argparse
import os
import sys

from sglang_ext.patches.base import TargetState, check_target
from sglang_ext.patches.contract.places import NoSourceError, check_contract, sglang_folder, source_with
from sglang_ext.patches.registry import PATCHES, installed_source, reports, untested_allowed, version_problem
from sglang_ext.patches.versions import (
    ALLOW_UNTESTED,
    installed_sglang_version,
    supported,
    tested_versions,
)


def _say(*lines: object) -> None:
    for line in lines:
        print(line)  # noqa: T201


def _states() -> bool:
    """The installed SGLang, patch by patch."""
    installed = installed_sglang_version()
    _say(f"sglang {installed}; tested with {tested_versions()}")
    problem = version_problem(installed, untested_allowed(os.environ))
    if problem:
        _say(problem)
        return False
    known = supported(installed)
    if known is None:
        _say(f"{ALLOW_UNTESTED}=1: all that is needed of sglang {installed} is there")
        return True
    fits = True
    for patch in PATCHES:
        found = [report for _, report in reports([patch], known.hashes(), installed_source())]
        wrong = [report for report in found if report.state is not TargetState.OK]
        fits = fits and not wrong
        _say(f"{'mismatch' if wrong else 'ok':8}  {patch.scope.value:7}  {patch.name}: {patch.summary}")
        _say(*(f"          {each.path}: {each.state.value}: {each.detail}" for each in wrong))
    return fits


def _check(where: str) -> bool:
    """The contract, and the hashes of a version that has them."""
    folder = sglang_folder(where)
    report = check_contract(folder)
    _say(f"{where}: {report.counts()}", *(f"  {each}" for each in report.broken))
    known = supported(where)
    source = source_with(folder)
    states = [check_target(path, known.hashes(), source) for path in sorted(report.targets)] if known else []
    wrong = [each for each in states if each.state is not TargetState.OK]
    _say(*(f"  {each.path}: {each.state.value}: {each.detail}" for each in wrong))
    broken = len(report.broken) + len(wrong)
    hashes = f"{len(states) - len(wrong)} hashes fit" if known else "no hashes"
    _say(f"{where}: {'ok' if not broken else f'{broken} do not hold'}; {hashes}")
    return not broken


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.patches", description=__doc__)
    parser.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="VERSION|FOLDER",
        help="hold contract and hashes to it",
    )
    args = parser.parse_args(argv)
    if args.check is None:
        return 0 if _states() else 1
    try:
        return 0 if _check(args.check or installed_sglang_version()) else 1
    except NoSourceError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
