"""``python -m sglang_ext.patches``: list the patches and whether they fit the installed SGLang.

``--hashes [NAME]`` prints the targets as they look now, in the form that the modules declare them, for an
upgrade: read the new source first, then renew the hashes. Exit status 1 when a patch does not fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from sglang_ext.patches.base import Patch, TargetState, check_patch, describe
from sglang_ext.patches.cpu import runtime
from sglang_ext.patches.registry import PATCHES
from sglang_ext.patches.version import SGLANG_VERSION, installed_sglang_version


def _print_hashes(patches: list[Patch]) -> None:
    for patch in patches:
        print(f"# {patch.name}")  # noqa: T201
        for target in patch.targets:
            found = describe(target.path)
            print(f'Target(\n    "{found.path}",\n    {found.signature!r},\n    "{found.source}",\n),')  # noqa: T201


def _print_states(patches: list[Patch]) -> bool:
    print(f"sglang {installed_sglang_version()}; patches written for {SGLANG_VERSION}")  # noqa: T201
    fits = True
    for patch in patches:
        wrong = [report for report in check_patch(patch) if report.state is not TargetState.OK]
        fits = fits and not wrong
        print(f"{'mismatch' if wrong else 'ok':8}  {patch.scope.value:7}  {patch.name}: {patch.summary}")  # noqa: T201
        for report in wrong:
            print(f"          {report.target.path}: {report.state.value}: {report.detail}")  # noqa: T201
    return fits


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.patches", description=__doc__)
    parser.add_argument(
        "--hashes", nargs="?", const="", metavar="NAME", help="print targets as they look now"
    )
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    if not runtime.accelerator_available():
        runtime.prepare_process(os.environ)
    names = {patch.name for patch in PATCHES}
    if args.hashes and args.hashes not in names:
        parser.error(f"--hashes: no patch {args.hashes!r}; there are {', '.join(sorted(names))}")
    if args.hashes is not None:
        _print_hashes([patch for patch in PATCHES if args.hashes in ("", patch.name)])
        return 0
    return 0 if _print_states(list(PATCHES)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
