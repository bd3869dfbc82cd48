"""Build the instruction tests on one machine, check them on another: see `instructions`."""

from __future__ import annotations

import argparse
from pathlib import Path

from b12x_conformance.emulation.instructions import cases


def main() -> int:
    """Returns how many cases failed."""
    parser = argparse.ArgumentParser(prog="python -m b12x_conformance.emulation", description=__doc__)
    parser.add_argument("task", choices=["build", "check"])
    parser.add_argument("folder", type=Path, help="where the libraries are")
    parser.add_argument("names", nargs="*", help="cases; all if none is given")
    arguments = parser.parse_args()
    failed = 0
    for case in cases():
        if arguments.names and case.name not in arguments.names:
            continue
        try:
            if arguments.task == "build":
                print(f"built   {case.build(arguments.folder)}", flush=True)
            else:
                print(f"passed  {case.name}: {case.check(arguments.folder / f'{case.name}.so')}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED  {case.name}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
