"""The report: what a run writes, what several runs become, and what a reader sees."""

from __future__ import annotations

import math
import os
from pathlib import Path

from b12x_conformance.report import FAILED, PASSED, SKIPPED, Result, Run, main, markdown


def result(case: str, adapter: str = "core", outcome: str = PASSED, **values: object) -> Result:
    return Result("linear layers", case, adapter, outcome, **values)  # type: ignore[arg-type]


def test_results_survive_writing_and_reading(tmp_path: Path) -> None:
    run = Run(
        (result("a", error=0.1, bound=0.2), result("b", outcome=FAILED, error=math.inf, bound=0.0)), {"core": "x"}
    )
    assert run.write(tmp_path).name == "results-core.json"
    assert Run.read([tmp_path]) == run


def test_runs_of_two_environments_become_one_table(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    Run((result("a", error=0.1, bound=0.2), result("b")), {"core": "the core"}).write(one)
    Run((result("a", "vllm", SKIPPED, reason="has no such layer"),), {"vllm": "an engine"}).write(two)
    main([one, two], tmp_path / "both")
    text = (tmp_path / "both" / "report.md").read_text()
    assert "| `a` | ok, 0.1 of 0.2 | - |" in text
    assert "| `b` | ok |  |" in text
    assert "- vllm: has no such layer (1: `a`)" in text
    assert "| linear layers | 2 passed; worst 50% of its bound | 1 skipped |" in text
    assert "an engine" in text
    assert "the core" in text


def test_a_later_result_replaces_an_earlier_one(tmp_path: Path) -> None:
    first = Run((result("a", outcome=FAILED, reason="off"),)).write(tmp_path / "1")
    os.utime(first, (1, 1))
    Run((result("a"),)).write(tmp_path / "2")
    merged = Run.read([tmp_path / "2", tmp_path / "1"])
    assert [r.outcome for r in merged.results] == [PASSED]


def test_failures_stand_out() -> None:
    text = markdown(Run((result("a", outcome=FAILED, error=0.5, bound=0.0, reason="M=3: not equal"),)))
    assert "## Failed" in text
    assert "- linear layers, `a`, core: M=3: not equal" in text
    assert "**FAILED**, 0.5 instead of exact" in text
    assert "1 failed; worst beyond any bound" in text


def test_fraction_of_the_bound() -> None:
    assert result("a", error=0.0, bound=0.0).of_bound == 0
    assert result("a", error=0.1, bound=0.0).of_bound == math.inf
    assert result("a", error=0.1, bound=0.4).of_bound == 0.25
    assert result("a").of_bound is None
