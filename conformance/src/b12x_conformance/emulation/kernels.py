"""The kernel tests of `b12x_core.testing` for kernels of sm_120a, on a Hopper GPU.

python -m b12x_conformance.emulation.kernels build FOLDER  # needs the compiler, nvcc, ptxas and cc, no GPU
python -m b12x_conformance.emulation.kernels check FOLDER  # needs a Hopper GPU, torch and tvm_ffi, no compiler

FOLDER is a store of kernels as `B12X_CACHE_DIR` names them: each entry stands under its key for sm_120a, and its
library has the shipped host code and the device code that `emulate` makes of the shipped PTX. So planning, ops and
tests do what they do on an SM120 GPU, and nothing that does not run there is tested.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from b12x_core import runtime
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear import SHARED_MEMORY, LinearConfig
from b12x_core.runtime.devices import DeviceFacts, fake
from b12x_core.runtime.store import LIBRARY, META, Entry
from b12x_core.testing.__main__ import GROUPS, report, run, selected
from b12x_core.testing.cases import Case

from b12x_conformance.emulation.errors import EmulationError
from b12x_conformance.emulation.link import emulate

ARCH, CAPABILITY = "sm_120a", (12, 0)
HOPPER = (9, 0)


@contextlib.contextmanager
def sm120(multiprocessors: int) -> Iterator[torch.device]:
    """Within this context `cuda:0` is an SM120 GPU to planning, to ops and to whoever asks torch."""
    with (
        fake(DeviceFacts(ARCH, multiprocessors, SHARED_MEMORY)),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITY),
    ):
        yield torch.device("cuda", 0)


def native(spec: KernelSpec) -> bool:
    """Whether a kernel multiplies by block-scaled matrix instructions, which nothing but an SM120 GPU has."""
    config = spec.config
    return isinstance(config, LinearConfig) and config.block_scaled


def chosen(groups: list[str], wanted: str, every: bool, device: torch.device) -> Iterator[Case]:
    """The cases of some groups whose kernel or name contains `wanted`; only those of native kernels unless `every`."""
    for case in selected(groups, wanted, device):
        if every or any(map(native, case.specs)):
            yield case


def emulator() -> str:
    """A hash of what emulates."""
    names = (path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".cuh"))
    files = sorted(path for path in names if path != Path(__file__))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def build(folder: Path, specs: list[KernelSpec], workers: int | None = None) -> Iterator[tuple[str, str]]:
    """Compile kernels for sm_120a, and put them into a store as they run on Hopper.

    Yields:
        The name of each kernel, and why it cannot be emulated or an empty text.
    """
    runtime.compile_all(specs, ARCH, keep=True, workers=workers)
    version = emulator()
    for spec in dict.fromkeys(specs):
        entry = Entry(spec, ARCH)
        meta = entry.path(folder) / META
        if meta.exists() and json.loads(meta.read_text()).get("emulator") == version:
            yield spec.name, ""
            continue
        shipped = entry.find()
        assert shipped is not None
        with entry.partial(folder) as partial:
            try:
                emulate(shipped.parent, out=partial / LIBRARY)
            except EmulationError as problem:
                yield spec.name, str(problem)
                continue
            entry.publish(partial, {"emulator": version})
        yield spec.name, ""


def main() -> int:
    """Returns the exit code: 0 if all passed, 1 if any failed, 2 without a Hopper GPU."""
    parser = argparse.ArgumentParser(prog="python -m b12x_conformance.emulation.kernels", description=__doc__)
    parser.add_argument("task", choices=["build", "check"])
    parser.add_argument("folder", type=Path, help="the store of emulated kernels")
    parser.add_argument("groups", nargs="*", default=["linear"], help=f"out of {', '.join(GROUPS)}; default: linear")
    parser.add_argument("--only", default="", help="the tests whose kernel or name contains this text")
    parser.add_argument("--every", action="store_true", help="also tests of kernels that Hopper has instructions for")
    parser.add_argument("--output", type=Path, default=None, help="write the results to this JSON file")
    parser.add_argument("--multiprocessors", type=int, default=132, help="of the GPU that will run them")
    parser.add_argument("--workers", type=int, default=None, help="kernels to compile at once")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    begin = time.perf_counter()
    if options.task == "build":
        with sm120(options.multiprocessors) as device:
            cases = chosen(options.groups, options.only, options.every, device)
            specs = list(dict.fromkeys(spec for case in cases for spec in case.specs))
        failed = 0
        for name, problem in build(options.folder, specs, options.workers):
            failed += bool(problem)
            print(f"{'FAILED' if problem else 'built '}  {name}  {problem}".rstrip(), flush=True)
        print(f"{len(specs) - failed} built, {failed} failed, {time.perf_counter() - begin:.0f} s")
        return 1 if failed or not specs else 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        print("no Hopper GPU is visible: emulated kernels cannot run here", file=sys.stderr)
        return 2
    os.environ["B12X_CACHE_DIR"] = str(options.folder)
    gpu = f"{torch.cuda.get_device_name()}, kernels of {ARCH} emulated"
    count = torch.cuda.get_device_properties(0).multi_processor_count
    with sm120(count) as device, runtime.loader.frozen():
        results = run(chosen(options.groups, options.only, options.every, device))
    return report(results, gpu, time.perf_counter() - begin, options.output)


if __name__ == "__main__":
    raise SystemExit(main())
