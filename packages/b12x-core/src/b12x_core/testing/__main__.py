"""`python -m b12x_core.testing`: every kernel test on the GPU of this machine, one line a kernel, and JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from b12x_core import runtime
from b12x_core.planning.linear import SHARED_MEMORY
from b12x_core.planning.linear_plan import checked_kernels
from b12x_core.runtime.devices import ARCHITECTURES, DeviceFacts, fake
from b12x_core.testing import launching, linear, quantize
from b12x_core.testing.cases import Case

# first what measures host time, of a process that has done little yet
GROUPS = {"launching": launching.cases, "linear": linear.cases, "quantize": quantize.cases}


@dataclass
class Result:
    """What the tests of one kernel found.

    Attributes:
        kernel: its name.
        cases: how many ran.
        failures: a sentence each.
        of_bound: the largest error as a fraction of its bound.
        seconds: that they took.
    """

    kernel: str
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    of_bound: float = 0.0
    seconds: float = 0.0

    def line(self) -> str:
        """For people."""
        verdict = f"FAIL {len(self.failures)} of {self.cases}" if self.failures else f"ok   {self.cases}"
        return f"{verdict:14} {self.kernel}  {self.of_bound:.0%} of its bound  {self.seconds:.1f} s"


def selected(groups: list[str], wanted: str, device: torch.device) -> Iterator[Case]:
    """The cases of some groups whose kernel or name contains `wanted`."""
    for group in groups:
        for case in GROUPS[group](device):
            if wanted in f"{case.kernel} {case.name}":
                yield case


def run(cases: Iterator[Case]) -> dict[str, Result]:
    """Run tests; a failing one does not keep others from running."""
    results: dict[str, Result] = {}
    for case in cases:
        result = results.setdefault(case.kernel, Result(case.kernel))
        begin = time.perf_counter()
        torch.manual_seed(20260101)
        try:
            result.of_bound = max(result.of_bound, case.run())
        except Exception as problem:
            result.failures.append(f"{case.name}: {type(problem).__name__}: {problem}")
            print(f"FAIL {case.kernel}: {result.failures[-1]}", file=sys.stderr, flush=True)
            if not isinstance(problem, AssertionError):
                traceback.print_exc(limit=4)
        result.cases += 1
        result.seconds += time.perf_counter() - begin
    return results


def prebuild(groups: list[str], wanted: str, arch: str, multiprocessors: int) -> None:
    """Compile the kernels that tests launch on a GPU of another machine."""
    with fake(DeviceFacts(arch, multiprocessors, SHARED_MEMORY)):
        specs = [spec for case in selected(groups, wanted, torch.device("cuda", 0)) for spec in case.specs]
    done = runtime.compile_all(specs, arch)
    print(f"{arch}: {len(done.compiled)} compiled, {len(done.present)} were there")


def report(results: dict[str, Result], gpu: str, seconds: float, output: Path | None) -> int:
    """Print what was found, write it to a JSON file if one is given; returns the exit code."""
    for result in results.values():
        print(result.line())
    failed = sum(len(result.failures) for result in results.values())
    total = sum(result.cases for result in results.values())
    print(f"{total - failed} passed, {failed} failed, {len(results)} kernels, {seconds:.0f} s")
    if output is not None:
        content = {"gpu": gpu, "results": [asdict(r) for r in results.values()]}
        output.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failed or not total else 0


def main() -> int:
    """Run, print, write; returns the exit code: 0 if all passed, 1 if any failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m b12x_core.testing", description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"out of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--only", default="", help="run the tests whose kernel or name contains this text")
    parser.add_argument("--output", type=Path, default=None, help="write the results to this JSON file")
    parser.add_argument("--compile", action="store_true", help="compile what the cache lacks; otherwise that fails")
    parser.add_argument(
        "--prebuild",
        choices=sorted(set(ARCHITECTURES.values())),
        help="run nothing: compile what the tests need on a GPU of this architecture; needs no GPU",
    )
    parser.add_argument(
        "--checked",
        action="store_true",
        help="test the linear kernels in the form that compute-sanitizer --tool racecheck can follow",
    )
    parser.add_argument("--multiprocessors", type=int, default=132, help="of that GPU")
    options = parser.parse_args()
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    with checked_kernels() if options.checked else contextlib.nullcontext():
        return execute(options, options.groups or list(GROUPS))


def execute(options: argparse.Namespace, groups: list[str]) -> int:
    """What the options say; returns the exit code."""
    if options.prebuild:
        prebuild(groups, options.only, options.prebuild, options.multiprocessors)
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device is visible: kernels cannot run here", file=sys.stderr)
        return 2
    if not options.compile:
        runtime.freeze()
    device = torch.device("cuda", torch.cuda.current_device())
    begin = time.perf_counter()
    results = run(selected(groups, options.only, device))
    gpu = torch.cuda.get_device_name(device)
    return report(results, gpu, time.perf_counter() - begin, options.output)


if __name__ == "__main__":
    raise SystemExit(main())
