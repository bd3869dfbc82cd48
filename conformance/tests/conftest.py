"""Adapters, devices and order of the conformance suite.

Every test that takes `adapter` runs once for each installed adapter. Tests run in the order in which a user would meet
a fault: the oracle itself, layers, whole models, a server.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from b12x_conformance import sglang_cpu
from b12x_conformance.cases import describe
from b12x_conformance.verdict import Verdict
from b12x_core import SCHEMES, counters, supports_linear
from b12x_core.adapters import GROUP, Adapter, AttentionCase, LinearCase, MoECase, discover

# Before any engine is imported: they read these once.
if not torch.cuda.is_available():
    os.environ.setdefault("B12X_CONFORMANCE_CPU", "1")
    sglang_cpu.activate()
elif not supports_linear(SCHEMES["bf16"], 128, 128, "cuda").ok:
    # There is no kernel for this GPU. The reference runs on it, and shows that everything around a kernel is right.
    os.environ.setdefault("B12X_REFERENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The suite says what each checkpoint must be served as.
os.environ.pop("B12X_FORCE_A16", None)

_ORDER = ("oracle", "cases", "report", "cpu", "layers", "model", "server")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--adapter", action="append", default=None, metavar="NAME", help="run for this adapter only; may be repeated"
    )
    pluginmanager.import_plugin("b12x_conformance.report_plugin")


def pytest_report_header() -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"b12x: {where}, B12X_REFERENCE={os.environ.get('B12X_REFERENCE', '0')}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "model: loads a whole model into an engine")
    config.addinivalue_line("markers", "server: starts an engine's HTTP server")
    adapter_names(config)  # a name that is not installed is said once, before anything is collected


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by name: an adapter is imported when its first test runs, so a broken one breaks its own tests."""
    if "adapter" in metafunc.fixturenames:
        metafunc.parametrize("adapter", adapter_names(metafunc.config), indirect=True, scope="session")


def adapter_names(config: pytest.Config) -> list[str]:
    """The installed adapters, or those of them that `--adapter` names."""
    found = sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})
    wanted = config.getoption("--adapter", None) or found
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise pytest.UsageError(f"--adapter {missing[0]}: not installed; found: {', '.join(found) or 'none'}")
    return [name for name in found if name in wanted]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((place for place, word in enumerate(_ORDER) if word in item.path.stem), len(_ORDER))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print every parameter of a problem whose test failed, wherever it failed."""
    report = yield
    problem = getattr(item, "callspec", None) and item.callspec.params.get("problem")
    if report.failed and problem is not None:
        report.sections.append(("parameters", describe(problem)))
    return report


@pytest.fixture(scope="session")
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """The adapter under test."""
    return discover([request.param])[request.param]


@pytest.fixture(scope="session")
def device() -> str:
    """Where layers run: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run on one CPU thread: the matrices of layer tests are so small that waking threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def expressible(adapter: Adapter) -> Callable[[str, LinearCase | MoECase | AttentionCase], None]:
    """Call with a hook and a case: skips the test, with the adapter's own sentence, if the engine cannot express it."""

    def check(hook: str, case: LinearCase | MoECase | AttentionCase) -> None:
        if not adapter.implements(hook):
            pytest.skip(f"adapter {adapter.name} does not implement {hook}")
        reason = adapter.cannot_express(case)
        if reason is not None:
            pytest.skip(reason)

    return check


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Callable[[str], set[str]]:
    """Call with an op after running a layer: the schemes or dtypes in which b12x served it since the test began."""
    counters.reset()
    properties = request.node.user_properties

    def schemes(op: str) -> set[str]:
        counted = counters.snapshot()
        properties[:] = [pair for pair in properties if pair[0] != "served_by"]
        properties.append(("served_by", ", ".join(counted)))
        return {key.removeprefix(f"{op}/") for key in counted if key.startswith(f"{op}/")}

    return schemes


@pytest.fixture
def verdict(record_error: Callable[[float, float], None]) -> Verdict:
    """Compares outputs with the truth and records the worst error."""
    return Verdict(record_error)
