"""The TypeScript client before a real router: its own tests, by Node's test runner."""

from __future__ import annotations

import asyncio
import json
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CLIENT = runpy.run_path(str(ROOT / "scripts" / "typescript_client.py"))
KEY = "the-key-of-this-test"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of its sources that can be built."""
    if why := CLIENT["obstacle"]():
        pytest.skip(why)
    return CLIENT["copy_to"](tmp_path_factory.mktemp("typescript") / "client")


@pytest.mark.parametrize("end", ["durable", ""])
async def test_its_own_tests_pass_before_a_router(
    end: str, sources: Path, start_worker: Any, start_router: Any
) -> None:
    worker = await start_worker()
    worker.answers = {"/open_session": (200, "as told"), "/close_session": (200, None)}
    worker.end_details = {"durability_end": end} if end else {}
    router = await start_router(worker, api_key=KEY)
    variables = {"ROUTER_URL": router.url, "ROUTER_KEY": KEY, "ROUTER_END": end}
    said = await asyncio.to_thread(CLIENT["run"], "npm", "test", cwd=sources, environment=variables)
    assert "# pass 10" in said
    assert "# fail 0" in said
    assert [path for _, path, _ in worker.calls] == ["/open_session", "/close_session"]


def test_a_wrong_type_is_an_error(sources: Path, tmp_path: Path) -> None:
    """The twin: the tests are compiled with the types that the package ships."""
    copy = CLIENT["copy_to"](tmp_path / "client")
    test = copy / "test" / "hints.test.ts"
    test.write_text(test.read_text("utf-8").replace("priority: 2", 'priority: "2"'), "utf-8")
    with pytest.raises(CLIENT["NodeError"], match="not assignable"):
        CLIENT["run"]("npx", "tsc", "-p", "tsconfig.json", cwd=copy)


def test_the_package_works_alone(sources: Path, tmp_path: Path) -> None:
    """Types included, in a folder that has nothing else."""
    packed = CLIENT["pack"](CLIENT["copy_to"](tmp_path / "client"), tmp_path)
    assert packed.is_file()


def test_the_package_is_the_router_s_release_and_needs_nothing() -> None:
    package = json.loads((CLIENT["SOURCES"] / "package.json").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert package["version"] == project["version"]
    assert "dependencies" not in package
    assert "resolved" not in (CLIENT["SOURCES"] / "package-lock.json").read_text("utf-8")
