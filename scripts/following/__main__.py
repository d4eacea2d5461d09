"""``python -m scripts.following``: reads and records the changes of a new SGLang release.

Reads source only, as ``python -m sglang_ext.patches --check`` does. pip fetches a version
that is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from scripts.following.differences import differences
from scripts.following.server_routes import server_routes
from sglang_ext.patches.contract.places import NoSourceError, check_contract, sglang_folder, source_with
from sglang_ext.patches.contract.source import Found
from sglang_ext.patches.versions import Declared


def _say(*lines: object) -> None:
    for line in lines:
        print(line)


def _hashes(where: str) -> None:
    folder = sglang_folder(where)
    source = source_with(folder)
    found = {path: source.find(path) for path in sorted(check_contract(folder).targets)}
    declared = {
        path: asdict(Declared(each.signature, each.source))
        for path, each in found.items()
        if isinstance(each, Found)
    }
    _say(json.dumps(declared, indent=2))


def _routes(where: str) -> None:
    _say(json.dumps(server_routes(source_with(sglang_folder(where))), indent=2))


def _diff(old: str, new: str) -> None:
    report = check_contract(sglang_folder(old))
    paths = {*report.targets, *report.needs["calls"], *report.needs["overrides"]}
    before, after = source_with(sglang_folder(old)), source_with(sglang_folder(new))
    _say(*differences(before, after, paths))


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.following", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--diff", nargs=2, metavar=("OLD", "NEW"), help="print the code to read")
    which.add_argument("--hashes", metavar="VERSION|FOLDER", help="print the contents of hashes/VERSION.json")
    which.add_argument("--routes", metavar="VERSION|FOLDER", help="print the contents of routes/VERSION.json")
    args = parser.parse_args(argv)
    try:
        if args.diff:
            _diff(*args.diff)
        elif args.hashes:
            _hashes(args.hashes)
        else:
            _routes(args.routes)
    except NoSourceError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
