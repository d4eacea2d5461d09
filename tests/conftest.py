"""Options and rules of the whole test run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["sglang_ext.testing.strict"]

# The machine is shared: how long an example takes says nothing. Examples are the same in each run.
settings.register_profile("short", deadline=None, derandomize=True)
# Long runs look for new examples.
settings.register_profile("long", deadline=None, print_blob=True)

INTEGRATION = Path(__file__).parent / "integration"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="full matrices and counts (`make test-long`)")
    parser.addoption("--no-integration", action="store_true", help="leave out what starts SGLang servers")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if "server_pool" not in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.fleet)
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long form; give --long"))
        if "integration" in item.keywords and config.getoption("--no-integration"):
            item.add_marker(pytest.mark.skip(reason="starts servers; --no-integration was given"))


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether tests should run in their long form."""
    return bool(request.config.getoption("--long"))
