"""Options and rules of the whole test run."""

from __future__ import annotations

import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.strict", "tests.support.cpu_seconds"]

# The machine is shared: how long an example takes says nothing. Examples are the same in each run at a desk,
# so that a change is judged by its own faults. Nightly and long runs look for new ones, and print how to
# reproduce a failure (hypothesis itself would repeat its examples wherever CI is set).
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None, print_blob=True, derandomize=False)

INTEGRATION = Path(__file__).parent / "integration"
COMMANDS = ("test_cluster.py", "test_demo.py", "test_pd_cluster.py", "test_stock_launcher.py")
"""Integration tests of the commands that users type."""
ROUTED = "router"
"""The folder of integration tests of the router: its fleets make the two parts with servers equally long."""
PROGRAMS = ("benchmarks", "cluster", "demo", "test_cli.py", "test_plugin.py")
"""Folders and files beside them that start programs without servers."""
MOVING = ("disagg", "engine", "tiered_store")
"""Folders of tests of moving and keeping KV, which wait much of their time: for disks and for verdicts."""
PARTS = ("fleets", "servers", "moving", "others")
"""The parts that `make test` runs side by side. The parts without servers take half as long as those with."""


def parts_of(file: Path) -> tuple[str, ...]:
    """The parts that tests of a file may belong to."""
    if INTEGRATION not in file.parents:
        place = file.relative_to(INTEGRATION.parent).parts[0] if INTEGRATION.parent in file.parents else ""
        return ("servers",) if place in PROGRAMS else ("moving",) if place in MOVING else ("others",)
    return ("servers",) if file.name in COMMANDS or file.parent.name == ROUTED else ("servers", "fleets")


def part_of(item: pytest.Item) -> str:
    """The part that a test belongs to: of the two with servers, the first has the tests that share a server
    or run a command or another program, and the router's, and the second has the tests that start servers of
    their own, several as a rule."""
    first, *rest = parts_of(item.path)
    return rest[0] if rest and "server_pool" not in getattr(item, "fixturenames", ()) else first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="full matrices and counts (`make test-long`)")
    parser.addoption(
        "--new-examples", action="store_true", help="property tests look for new examples (`.ci/run nightly`)"
    )
    parser.addoption("--fast", action="store_true", help="no SGLang servers, nothing slow (`make test-fast`)")
    parser.addoption("--part", choices=PARTS, help="only the tests of this part of a run")
    parser.addoption("--share", metavar="K/N", help="only the K-th of N shares of the files of tests")


def pytest_configure(config: pytest.Config) -> None:
    is_new = config.getoption("--long") or config.getoption("--new-examples")
    settings.load_profile("new" if is_new else "same")
    from tests.support.servers.ports import free_port

    free_port()  # its socket is no test's


def share_of(file: Path, shares: int) -> int:
    """The share of so many, from 1, that a file of tests belongs to, whatever other files there are."""
    return zlib.crc32(file.relative_to(INTEGRATION.parent).as_posix().encode()) % shares + 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part, share = config.getoption("--part"), config.getoption("--share")
    if config.getoption("--fast") and collection_path == INTEGRATION:
        return True
    if not collection_path.is_file() or collection_path.name == "conftest.py":
        return None
    if share:
        number, shares = map(int, share.split("/"))
        if share_of(collection_path, shares) != number:
            return True
    return True if part and part not in parts_of(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, fast = config.getoption("--part"), config.getoption("--fast")
    left_out = [
        item
        for item in items
        if (part and part_of(item) != part) or (fast and {"slow", "long"} & item.keywords.keys())
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.integration)
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long form; give --long"))


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether tests should run in their long form."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, key) of 127.0.0.1, vouching for itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", cert, "-days", "3650", "-subj", "/CN=router",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The key of a cluster."""
    path = tmp_path / "cluster.key"
    path.touch(mode=0o600)
    path.write_text("the-key-of-a-test-0123456789-abcdefghijklmnop\n")
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model's tokenizer."""
    from sglang_ext.testing.tokenizer import write_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 4096)
    return folder
