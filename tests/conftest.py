"""Options of the whole test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="full matrices and counts (`make test-long`)")
    parser.addoption("--no-integration", action="store_true", help="leave out what starts SGLang servers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long form; give --long"))
        if "integration" in item.keywords and config.getoption("--no-integration"):
            item.add_marker(pytest.mark.skip(reason="starts servers; --no-integration was given"))


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether tests should run in their long form."""
    return bool(request.config.getoption("--long"))
