"""Compiling of what the store lacks, in worker processes, each kernel once however many processes want it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import filelock

from b12x_core.errors import CompileError
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import progress as progress_module
from b12x_core.runtime import resources, store
from b12x_core.runtime.progress import Progress

BUSY_SECONDS = 0.1
"""How long to wait for a kernel that another process compiles before trying the next."""

KEPT = ("kernel.o", "kernel.ptx", "kernel.mlir", "kernel.cubin")
"""What `keep` stores beside a kernel."""


@dataclass(frozen=True)
class Compiled:
    """What `compile_all` did.

    Attributes:
        compiled: names of the kernels that this call compiled.
        present: names of those that were there, or that another process compiled meanwhile.
        peak_bytes: most memory that one worker took.
    """

    compiled: tuple[str, ...]
    present: tuple[str, ...]
    peak_bytes: int = 0


class Worker:
    """A worker process for one architecture; it is started by the first request and again after it died."""

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(kill=error is not None)

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
            environment["CUTE_DSL_ARCH"] = self._arch
            environment["CUDA_VISIBLE_DEVICES"] = ""  # compiling must not take memory of a GPU
            # the same modules as here, whatever changed sys.path
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-m", "b12x_core.runtime.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        return self._process

    def stop(self, kill: bool = False) -> int:
        """End the process; returns its exit code, negative for a signal."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if kill:
            process.kill()
        with process:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        return process.returncode

    def request(self, **request: Any) -> dict[str, Any]:
        """Have one kernel built; the worker's answer."""
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            return {"error": self._death()}
        answer: dict[str, Any] = json.loads(line)
        # the compiler gives little memory back
        if answer.get("peak_bytes", 0) > resources.WORKER_BYTES * 3 // 4:
            self.stop()
        return answer

    def _death(self) -> str:
        code = self.stop()
        assert self._errors is not None
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip()[-2000:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (9 is what the kernel sends when memory runs out)" if code == -9 else ""
        return f"the worker process {how}{hint}" + (f": {tail}" if tail else "")


@dataclass
class _Job:
    entry: store.Entry
    error: str | None = None
    compiled: bool = False


class _Batch:
    """The kernels of one call, shared by its threads."""

    def __init__(self, entries: list[store.Entry], folder: Path, keep: bool, progress: Progress) -> None:
        self.jobs = [_Job(entry) for entry in entries]
        self.peak_bytes = 0
        self._waiting = deque(self.jobs)
        self._cancelled = False
        self._folder, self._keep, self._progress = folder, keep, progress

    def run(self, worker: Worker) -> None:
        """Take kernels until none is left."""
        while not self._cancelled:
            try:
                job = self._waiting.popleft()
            except IndexError:
                return
            try:
                with job.entry.lock(self._folder).acquire(timeout=BUSY_SECONDS):
                    self._build(job, worker)
            except filelock.Timeout:
                self._waiting.append(job)
            except Exception as error:
                job.error = f"{type(error).__name__}: {error}"

    def cancel(self) -> None:
        """Begin no other kernel."""
        self._cancelled = True

    def _build(self, job: _Job, worker: Worker) -> None:
        if _present(job.entry, self._keep):
            return
        name = job.entry.spec.name
        self._progress.begin(name)
        try:
            with job.entry.partial(self._folder) as partial:
                answer = worker.request(
                    spec=job.entry.spec.to_json(),
                    key=job.entry.key,
                    arch=job.entry.arch,
                    folder=str(partial),
                    keep=self._keep,
                )
                job.error = answer.get("error")
                if job.error is None:
                    self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
                    job.entry.publish(partial, {"seconds": answer["seconds"]})
                    job.compiled = True
        finally:
            self._progress.end(name, job.error)


def _present(entry: store.Entry, keep: bool) -> bool:
    library = entry.find()
    return library is not None and (not keep or all((library.parent / name).exists() for name in KEPT))


def compile_all(
    specs: Iterable[KernelSpec],
    arch: str,
    *,
    keep: bool = False,
    progress: Callable[[int, str], Progress] | None = None,
    workers: int | None = None,
) -> Compiled:
    """Compile the kernels that no folder of `B12X_CACHE_DIR` has, several at once.

    Args:
        specs: kernels; duplicates count once.
        arch: "sm_90a", "sm_120a" or "sm_121a". No GPU is needed.
        keep: also store `kernel.o`, `kernel.ptx`, `kernel.mlir` (host code) and `kernel.cubin`, for what examines
            kernels.
        progress: (number of kernels, arch) -> what shows it; by default a bar on a terminal, else lines on stderr.
        workers: processes that compile at once; by default what cores and memory allow.

    Raises:
        CompileError: some failed, after the others were compiled; the sentence names all that did and why.
    """
    entries = [store.Entry(spec, arch) for spec in dict.fromkeys(specs)]
    missing = [entry for entry in entries if not _present(entry, keep)]
    if not missing:
        return Compiled((), tuple(entry.spec.name for entry in entries))
    folder = store.writable_folder()
    count = min(len(missing), workers or resources.worker_limit(len(missing)))
    with (progress or progress_module.default)(len(missing), arch) as shown:
        batch = _Batch(missing, folder, keep, shown)

        def run() -> None:
            with Worker(arch) as worker:
                batch.run(worker)

        with futures.ThreadPoolExecutor(count, "b12x-compile") as pool:
            running = [pool.submit(run) for _ in range(count)]
            try:
                for one in running:
                    one.result()
            except BaseException:  # an interrupt, which reached the workers too
                batch.cancel()
                raise
    failed = [job for job in batch.jobs if job.error is not None]
    _record(sum(job.compiled for job in batch.jobs))
    if failed:
        reasons = [f"{job.entry.spec.name} ({job.entry.spec.config}): {job.error}" for job in failed]
        raise CompileError(
            f"{len(failed)} of {len(missing)} kernels could not be compiled for {arch}:\n" + "\n".join(reasons)
        )
    compiled = {job.entry.spec.name for job in batch.jobs if job.compiled}
    names = [entry.spec.name for entry in entries]
    return Compiled(
        tuple(name for name in names if name in compiled),
        tuple(name for name in names if name not in compiled),
        batch.peak_bytes,
    )


_count = 0
_count_lock = threading.Lock()


def _record(kernels: int) -> None:
    global _count
    with _count_lock:
        _count += kernels


def compiled_count() -> int:
    """How many kernels this process had compiled."""
    return _count
