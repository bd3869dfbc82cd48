"""The report: a table of adapters by cases with the worst error of each, as Markdown and JSON.

    pytest conformance/tests --report DIR          writes DIR/results-<adapters>.json and DIR/report.md
    python -m b12x_conformance.report DIR... -o OUT     one table out of the results of several runs

Each adapter runs in an environment of its own, so a whole report is made of several runs. The table is drawn from all
results in a folder; a later result of the same case and adapter replaces an earlier one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_PREFIX = "results-"


@dataclass(frozen=True)
class Result:
    """What came of one case with one adapter.

    Attributes:
        level: part of the suite ("linear layers").
        case: id of the case.
        adapter: name of the adapter.
        outcome: "passed", "failed" or "skipped".
        error, bound: the error closest to its bound, and that bound; None where nothing was measured. JSON has no
            infinity, so an infinite error is stored as the text "inf".
        served_by: keys of `b12x_core.counters` that served the case, or None.
        reason: why it was skipped, or the last line of a failure.
        seconds: time of the test.
    """

    level: str
    case: str
    adapter: str
    outcome: str
    error: float | None = None
    bound: float | None = None
    served_by: str | None = None
    reason: str | None = None
    seconds: float = 0.0

    @property
    def of_bound(self) -> float | None:
        """Error as a fraction of its bound. 0 for an exact case that is exact."""
        if self.error is None or self.bound is None:
            return None
        if self.bound == 0:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.bound


@dataclass(frozen=True)
class Run:
    """Results of one or several runs.

    Attributes:
        results: one for each case and adapter.
        environment: for each adapter its versions and device, in words.
    """

    results: tuple[Result, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the results as JSON to a file that is named after their adapters."""
        folder.mkdir(parents=True, exist_ok=True)
        adapters = sorted({result.adapter for result in self.results}) or ["none"]
        path = folder / f"{_PREFIX}{'+'.join(adapters)}.json"
        path.write_text(self.json())
        return path

    def json(self) -> str:
        """The results as JSON."""
        rows = [{k: "inf" if v == math.inf else v for k, v in asdict(result).items()} for result in self.results]
        return json.dumps({"environment": self.environment, "results": rows}, indent=1) + "\n"

    @staticmethod
    def read(folders: Iterable[Path]) -> Run:
        """All results in some folders, merged: of the same case and adapter, the one written last."""
        files = sorted(
            (path for folder in folders for path in folder.glob(f"{_PREFIX}*.json")), key=lambda p: p.stat().st_mtime_ns
        )
        merged: dict[tuple[str, str, str], Result] = {}
        environment: dict[str, str] = {}
        for path in files:
            content: dict[str, Any] = json.loads(path.read_text())
            environment |= content["environment"]
            for row in content["results"]:
                values: dict[str, Any] = {k: math.inf if v == "inf" else v for k, v in row.items()}
                result = Result(**values)
                merged[result.level, result.case, result.adapter] = result
        return Run(tuple(merged.values()), environment)


def markdown(run: Run) -> str:
    """The report as Markdown: a summary, what failed, what was skipped and why, and every case."""
    adapters = sorted({result.adapter for result in run.results})
    levels = list(dict.fromkeys(result.level for result in run.results))
    lines = ["# Conformance report", ""]
    lines += [f"- **{name}**: {words}" for name, words in sorted(run.environment.items()) if name in adapters]
    lines += ["", "Errors are relative to the truth in float64, as a fraction of what the recipe allows.", ""]
    lines += _table(["level", *adapters], [[level, *_summaries(run, level, adapters)] for level in levels])
    failed = [result for result in run.results if result.outcome == FAILED]
    if failed:
        lines += ["", "## Failed", ""]
        lines += [f"- {r.level}, `{r.case}`, {r.adapter}: {_one_line(r.reason)}" for r in failed]
    skipped = [result for result in run.results if result.outcome == SKIPPED]
    if skipped:
        lines += ["", "## Not expressible", ""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for result in skipped:
            reasons.setdefault((result.adapter, _one_line(result.reason)), []).append(result.case)
        lines += [f"- {name}: {why} ({len(cases)}: {_some(cases)})" for (name, why), cases in reasons.items()]
    by_place = {(r.level, r.case, r.adapter): r for r in run.results}
    for level in levels:
        cases = list(dict.fromkeys(r.case for r in run.results if r.level == level))
        rows = [[f"`{case}`", *(_cell(by_place.get((level, case, name))) for name in adapters)] for case in cases]
        lines += ["", f"## {level[:1].upper()}{level[1:]}", "", *_table(["case", *adapters], rows)]
    return "\n".join(lines) + "\n"


def _summaries(run: Run, level: str, adapters: Sequence[str]) -> list[str]:
    cells = []
    for name in adapters:
        results = [r for r in run.results if r.level == level and r.adapter == name]
        counts = [(sum(r.outcome == outcome for r in results), outcome) for outcome in (PASSED, FAILED, SKIPPED)]
        words = ", ".join(f"{count} {outcome}" for count, outcome in counts if count)
        fractions = [r.of_bound for r in results if r.of_bound is not None and r.outcome != SKIPPED]
        cells.append(words + (f"; worst {_percent(max(fractions))}" if fractions else ""))
    return cells


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.outcome == SKIPPED:
        return "-"
    mark = "ok" if result.outcome == PASSED else "**FAILED**"
    if result.error is None or result.bound is None:
        return mark
    if result.bound == 0:
        return f"{mark}, exact" if result.error == 0 else f"{mark}, {result.error:.2g} instead of exact"
    return f"{mark}, {result.error:.2g} of {result.bound:.2g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [row(head), row(["---"] * len(head)), *map(row, rows)]


def _percent(fraction: float) -> str:
    return "beyond any bound" if math.isinf(fraction) else f"{fraction:.0%} of its bound"


def _one_line(reason: str | None) -> str:
    return " ".join((reason or "no reason given").split()).replace("|", "\\|")


def _some(cases: Sequence[str]) -> str:
    return ", ".join(f"`{case}`" for case in cases[:3]) + (", ..." if len(cases) > 3 else "")


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders that runs with --report wrote.", exists=True)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the report; the first one.")] = None,
) -> None:
    """Make one report out of the results of several runs."""
    run = Run.read(folders)
    if not run.results:
        raise typer.BadParameter(f"no {_PREFIX}*.json in {', '.join(map(str, folders))}", param_hint="folders")
    target = output or folders[0]
    target.mkdir(parents=True, exist_ok=True)
    (target / "report.md").write_text(markdown(run))
    (target / "report.json").write_text(run.json())
    typer.echo(f"{target / 'report.md'}: {len(run.results)} results")


if __name__ == "__main__":
    typer.run(main)
