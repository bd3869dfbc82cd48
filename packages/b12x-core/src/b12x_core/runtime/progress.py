"""How compiling shows where it is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Protocol, Self

import rich.progress
from rich.console import Console


class Progress(Protocol):
    """Told by several threads what begins and ends; a context manager around the whole."""

    def begin(self, name: str) -> None:
        """A kernel is being compiled."""

    def end(self, name: str, error: str | None) -> None:
        """A kernel is done, or failed with an error."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Quiet:
    """Shows nothing."""

    def begin(self, name: str) -> None:
        """Nothing."""

    def end(self, name: str, error: str | None) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return None


def quiet(total: int, arch: str) -> Progress:
    """Show nothing."""
    del total, arch
    return Quiet()


class Lines(Quiet):
    """A line on stderr when a kernel is done."""

    def __init__(self, total: int, arch: str) -> None:
        self._total, self._arch, self._done = total, arch, 0
        self._lock = threading.Lock()

    def end(self, name: str, error: str | None) -> None:
        """Print the line."""
        with self._lock:
            self._done += 1
            what = "failed to compile" if error else "compiled"
            print(f"b12x: {self._done}/{self._total} {what} {name} for {self._arch}", file=sys.stderr, flush=True)


class Bar:
    """A bar on the terminal, with counts, an estimate, and what is being compiled."""

    def __init__(self, total: int, arch: str) -> None:
        self._current: list[str] = []
        self._lock = threading.Lock()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn(f"compiling for {arch}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[current]}", markup=False),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total, current="")

    def _show(self, advance: int) -> None:
        first, *others = self._current or [""]
        current = first + (f" and {len(others)} more" if others else "")
        self._bar.update(self._task, advance=advance, current=current)

    def begin(self, name: str) -> None:
        """Name it."""
        with self._lock:
            self._current.append(name)
            self._show(0)

    def end(self, name: str, error: str | None) -> None:
        """Advance."""
        with self._lock:
            self._current.remove(name)
            self._show(1)
            if error:
                self._bar.console.print(f"failed to compile {name}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()


def default(total: int, arch: str) -> Progress:
    """A bar if stderr is a terminal, lines otherwise."""
    return Bar(total, arch) if sys.stderr.isatty() else Lines(total, arch)
