"""pytest plug-in that gathers the report: `--report DIR`, and the fixture `record_error`.

Only tests that are parametrized over `adapter` enter the table. Measured values travel as user properties of a test,
so they also stand in the JUnit file that pytest's own `--junitxml` writes, and pass between processes under xdist.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from b12x_core.adapters import discover

from b12x_conformance.report import FAILED, PASSED, SKIPPED, Result, Run, markdown

RecordError = Callable[[float, float], None]
_KEY = pytest.StashKey["Gatherer"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--report`."""
    parser.addoption("--report", metavar="DIR", default=None, help="write a table of adapters by cases to this folder")


def pytest_configure(config: pytest.Config) -> None:
    """Gather results where they arrive: in the one process, or in the controller of xdist."""
    folder = config.getoption("report", None)
    if folder is not None and not hasattr(config, "workerinput"):
        config.stash[_KEY] = Gatherer(Path(folder))
        config.pluginmanager.register(config.stash[_KEY], "b12x-report")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say which row and column a test belongs to."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or "adapter" not in callspec.params:
        return
    adapter = str(callspec.params["adapter"])
    rest = callspec.id.removeprefix(adapter).lstrip("-")
    name = getattr(item, "originalname", item.name).removeprefix("test_")
    level = item.path.stem.removeprefix("test_").replace("_", " ")
    # test_linear in test_linear_layers.py: the name of the function says nothing that the level does not.
    case = name if not rest else rest if level.startswith(name) else f"{name}[{rest}]"
    item.user_properties += [("adapter", adapter), ("level", level), ("case", case)]


@pytest.fixture
def record_error(request: pytest.FixtureRequest) -> RecordError:
    """Call with an error and its bound, any number of times: the one closest to its bound enters the report."""
    properties: list[tuple[str, object]] = request.node.user_properties
    worst: Result | None = None

    def record(error: float, bound: float) -> None:
        nonlocal worst
        result = Result("", "", "", "", float(error), float(bound))
        fraction, so_far = result.of_bound, None if worst is None else worst.of_bound
        assert fraction is not None
        if so_far is None or fraction > so_far:
            worst = result
            properties[:] = [pair for pair in properties if pair[0] not in ("error", "bound")]
            properties.extend([("error", result.error), ("bound", result.bound)])

    return record


class Gatherer:
    """Turns the reports of tests into a `Run` and writes it at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: list[Result] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the call of a test, or the phase that kept it from being called."""
        properties: dict[str, Any] = dict(report.user_properties)
        if "adapter" not in properties or (report.when != "call" and report.passed):
            return
        outcome = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED}[report.outcome]
        self._results.append(
            Result(
                level=properties["level"],
                case=properties["case"],
                adapter=properties["adapter"],
                outcome=outcome,
                error=properties.get("error"),
                bound=properties.get("bound"),
                served_by=properties.get("served_by"),
                reason=_reason(report),
                seconds=round(report.duration, 3),
            )
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Generator[None]:
        """Write the results of this run, and draw the table of all runs in the folder."""
        yield
        adapters = sorted({result.adapter for result in self._results})
        Run(tuple(self._results), {name: _environment(name) for name in adapters}).write(self._folder)
        (self._folder / "report.md").write_text(markdown(Run.read([self._folder])))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say where the report is."""
        terminalreporter.write_line(f"conformance report: {self._folder / 'report.md'}")


def _reason(report: pytest.TestReport) -> str | None:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return None if crash is None else str(crash.message).split("\n", 1)[0]


def _environment(adapter: str) -> str:
    info = discover([adapter])[adapter].info
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}"
    return (
        f"{info.engine} {info.installed or 'not installed'} (serves {info.serves}), b12x-core {version('b12x-core')}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}"
    )
