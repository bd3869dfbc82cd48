"""Where the texts to compare are: `pytest conformance/across_engines --results DIR`."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from b12x_conformance import texts

_KEY = pytest.StashKey[dict[str, texts.Texts]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="DIR", required=True, help="folder that runs with --report wrote to")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_KEY] = texts.read(Path(config.getoption("--results")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every two engines and each problem that both of them had."""
    found = metafunc.config.stash[_KEY]
    pairs = [
        pytest.param(problem, one, other, id=f"{one}-{other}-{problem}")
        for one, other in combinations(sorted(found), 2)
        for problem in found[one]
        if problem in found[other]
    ]
    if not pairs:
        reason = f"texts of two engines are needed; there are those of {', '.join(found) or 'none'}"
        pairs = [pytest.param("", "", "", marks=pytest.mark.skip(reason=reason))]
    metafunc.parametrize(("problem", "one", "other"), pairs)


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, texts.Texts]:
    """Texts by adapter and problem."""
    return request.config.stash[_KEY]
