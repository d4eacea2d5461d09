"""A release: one version, a changelog in its form, packages with all files, an image of the wheel."""

from __future__ import annotations

import fnmatch
import json
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.patches.versions import SGLANG_VERSION
from sglang_ext.router import RouterConfig

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DIST = runpy.run_path(str(ROOT / "scripts" / "dist.py"))
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


# -- changelog ------------------------------------------------------------------------------------------


def wrong_in(changelog: str, version: str) -> list[str]:
    """Lines that do not follow Keep a Changelog 1.1."""
    found, seen, releases = [], set(), []
    for line in changelog.splitlines():
        if line.startswith("## "):
            release = re.fullmatch(r"## \[(Unreleased|\d+\.\d+\.\d+)\](?: - \d{4}-\d\d-\d\d)?", line)
            if release is None or (" - " in line) is (release[1] == "Unreleased"):
                found.append(f"not a release: {line}")
            else:
                releases.append(release[1])
            seen = set()
        elif line.startswith("### "):
            kind = line.removeprefix("### ")
            if kind not in KINDS or kind in seen:
                found.append(f"not a section, or there already: {line}")
            seen.add(kind)
    numbers = [tuple(map(int, name.split("."))) for name in releases if name != "Unreleased"]
    if numbers != sorted(set(numbers), reverse=True) or "Unreleased" in releases[1:]:
        found.append("the newest release is not first")
    if numbers and numbers[0] > tuple(map(int, version.split("."))):
        found.append(f"{releases} are released, and the version is {version}")
    return found


def test_the_changelog_has_its_form() -> None:
    assert wrong_in((ROOT / "CHANGELOG.md").read_text(), PROJECT["version"]) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("## [Unreleased]\n### Added\n### Fixed\n## [0.1.0] - 2026-01-31\n### Added\n", 0),
        ("## [Unreleased]\n### Added\n### Fixed\n### Added\n", 1),
        ("## [Unreleased]\n### Improved\n", 1),
        ("## [Unreleased] - 2026-01-31\n", 1),
        ("## [0.1.0]\n", 1),
        ("## [0.0.9] - 2026-01-31\n## [0.1.0] - 2026-02-28\n", 1),
        ("## [0.2.0] - 2026-01-31\n", 1),
    ],
)
def test_another_form_is_seen(text: str, count: int) -> None:
    assert len(wrong_in(text, "0.1.0")) == count


# -- packages -------------------------------------------------------------------------------------------


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert "version" not in PROJECT.get("dynamic", ())
    sources = (ROOT / "sglang_ext").rglob("*.py")
    assert not [path for path in sources if re.search("^__version__ =", path.read_text(), re.MULTILINE)]


def test_every_file_of_a_package_has_its_place_in_the_wheel() -> None:
    kept = {"sglang_ext/cli.py", "sglang_ext/router/static/ui/x.js", "sglang_ext/patches/base.py"}
    assert DIST["shipped"]([*kept, "router", "docs/x.md", "README.md"]) == kept


def test_what_a_wheel_lacks_or_has_too_much_is_found() -> None:
    wheel = ["a/b.py", "a/old.py", "a-1.dist-info/METADATA"]
    assert DIST["lacking"](["a/b.py"], wheel[::2]) == ([], [])
    assert DIST["lacking"](["a/b.py", "a/c.js"], wheel) == (["a/c.js"], ["a/old.py"])


def test_the_client_s_packages_have_its_files_and_work_alone(tmp_path: Path) -> None:
    """On the Pythons that are here; the twin lacks a module."""
    source = tmp_path / "source"
    for name in ("sglang_ext/client", "clients/python"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "sglang_ext_client")
        )
    packages = DIST["build_client"](source, tmp_path / "out")
    assert len(packages) == 2
    for package in packages:
        assert f"{sys.version_info[0]}.{sys.version_info[1]}" in DIST["try_client"](package, tmp_path)
    (source / "sglang_ext" / "client" / "connection.py").unlink()
    shutil.rmtree(source / DIST["CLIENT"] / "sglang_ext_client")
    shutil.rmtree(source / DIST["CLIENT"] / "build")
    wheel = DIST["build_client"](source, tmp_path / "damaged")[0]
    (tmp_path / "again").mkdir()
    with pytest.raises(DIST["DistError"], match="connection"):
        DIST["try_client"](wheel, tmp_path / "again")


def test_the_client_has_the_version_of_its_router() -> None:
    client = tomllib.loads((ROOT / "clients" / "python" / "pyproject.toml").read_text())["project"]
    assert (client["version"], client["dependencies"]) == (PROJECT["version"], [])


@pytest.mark.long
def test_wheel_and_source_distribution_install_beside_sglang_and_work(tmp_path: Path) -> None:
    """`make dist` as it is; minutes, most of them for compiling."""
    command = [sys.executable, str(ROOT / "scripts" / "dist.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    version = PROJECT["version"]
    names = {
        f"{package}-{version}{kind}"
        for package in ("sglang_ext", "sglang_ext_client")
        for kind in ("-py3-none-any.whl", ".tar.gz")
    }
    if not DIST["obstacle"]():
        tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        names.add(f"sglang_ext-{version}-{tag}-{tag}-{platform}.whl")
    if not DIST["typescript_client"].obstacle():
        names.add(f"sglang-ext-client-{version}.tgz")
    assert {path.name for path in tmp_path.iterdir()} == names


# -- image ----------------------------------------------------------------------------------------------


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Containerfile, in order: name and arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name, rest.strip()


def wrong_in_image(text: str) -> list[str]:
    """The parts of a Containerfile that do not fit the project."""
    found = []
    steps = list(instructions(text))
    given = dict(steps)
    base = dict(rest.split("=", 1) for name, rest in steps if name == "ARG")["SGLANG_IMAGE"]
    if base.rpartition(":")[2] != f"v{SGLANG_VERSION}" or given["FROM"] != "${SGLANG_IMAGE}":
        found.append(f"not on SGLang {SGLANG_VERSION}")
    wheel = f"dist/sglang_ext-{PROJECT['version']}-py3-none-any.whl"
    copied = [rest.split()[0] for name, rest in steps if name == "COPY"]
    if not any(fnmatch.fnmatch(wheel, pattern) for pattern in copied):
        found.append(f"does not copy {wheel}")
    for extras in re.findall(r"\.whl\)\[([^\]]*)\]", text):
        found += [f"no extra {e}" for e in extras.split(",") if e not in PROJECT["optional-dependencies"]]
    user = given.get("USER", "root")
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
        found.append(f"runs as {user}")
    elif f"--uid {user.split(':')[0]} " not in text or f"--gid {user.split(':')[1]} " not in text:
        found.append(f"no step makes the user {user}")
    if [name for name, _ in steps].index("USER") < max(
        i for i, (name, _) in enumerate(steps) if name == "RUN"
    ):
        found.append("builds as a user")
    if given["EXPOSE"].split() != [str(RouterConfig.__dataclass_fields__["port"].default)]:
        found.append(f"exposes {given['EXPOSE']}")
    if json.loads(given["ENTRYPOINT"])[0] not in PROJECT["scripts"]:
        found.append(f"starts {given['ENTRYPOINT']}")
    return found


IMAGE = (ROOT / "deploy" / "Containerfile").read_text()


def test_the_image_fits_the_project() -> None:
    assert wrong_in_image(IMAGE) == []


@pytest.mark.parametrize(
    ("is_there", "instead"),
    [
        (f":v{SGLANG_VERSION}", ":v0.5.20"),
        ("dist/sglang_ext-*-none", "dist/sglang_extension-*-none"),
        ("[redis,otel]", "[redis,telemetry]"),
        ("USER 10001:10001", "USER root"),
        ("--uid 10001", "--uid 10002"),
        ("EXPOSE 30000", "EXPOSE 8000"),
        ('["sglang-ext"]', '["sglang-extension"]'),
    ],
)
def test_an_image_that_does_not_fit_is_seen(is_there: str, instead: str) -> None:
    assert is_there in IMAGE
    assert len(wrong_in_image(IMAGE.replace(is_there, instead))) == 1
