"""Kernels cross-compiled without a GPU: which, for what, and what the assembler made of each."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from b12x_core import runtime
from b12x_core.planning import inventory
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime.store import Entry
from b12x_core.tools.main_loop import Loop, main_loop
from b12x_core.tools.sass import Resources, disassemble, dynamic_shared, resources

ARCHITECTURES = ("sm_120a", "sm_90a")
SETS = {"representative": inventory.representative, "all": inventory.everything}


def table(arch: str) -> Path:
    """The stored table of an architecture."""
    return Path(__file__).parent / f"resources-{arch}.json"


class Kernels:
    """The kernels of a run, compiled for both architectures before the first is looked at."""

    def __init__(self, specs: list[KernelSpec]) -> None:
        self.specs = specs
        for arch in ARCHITECTURES:
            runtime.compile_all([spec for spec in specs if inventory.runs_on(spec, arch)], arch, keep=True)
        # a disassembler takes half a second a kernel
        pairs = [(spec, arch) for arch in ARCHITECTURES for spec in specs if inventory.runs_on(spec, arch)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._read = dict(zip(pairs, pool.map(lambda pair: self._look_at(*pair), pairs), strict=True))

    def _look_at(self, spec: KernelSpec, arch: str) -> tuple[Resources, Loop | None]:
        cubin = self._file(spec, arch, "kernel.cubin").read_bytes()
        text = disassemble(cubin)
        return resources(cubin, text), main_loop(text)

    def resources(self, spec: KernelSpec, arch: str) -> Resources:
        """What the assembler made of a kernel."""
        return self._read[spec, arch][0]

    def loop(self, spec: KernelSpec, arch: str) -> Loop:
        """The loop in which a kernel multiplies."""
        found = self._read[spec, arch][1]
        assert found is not None
        return found

    @cache  # noqa: B019, one object a run
    def shared(self, spec: KernelSpec, arch: str) -> int:
        """Bytes of shared memory of a block."""
        launched = dynamic_shared(self._file(spec, arch, "kernel.mlir").read_text())
        return self.resources(spec, arch).static_shared + launched

    def row(self, spec: KernelSpec, arch: str) -> dict[str, int]:
        """The row of the stored table."""
        found = self.resources(spec, arch)
        return {"registers": found.registers, "shared": self.shared(spec, arch), "code": found.code}

    def _file(self, spec: KernelSpec, arch: str, name: str) -> Path:
        library = Entry(spec, arch).find()
        assert library is not None
        return library.parent / name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", choices=tuple(SETS), default="representative", help="which kernels to compile")
    parser.addoption("--update", action="store_true", help="write the stored tables anew, of all kernels compiled")


def pytest_configure(config: pytest.Config) -> None:
    config.b12x_specs = SETS[config.getoption("kernels")]()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    found = Kernels(pytestconfig.b12x_specs)  # type: ignore[attr-defined]
    if pytestconfig.getoption("update"):
        for arch in ARCHITECTURES:
            rows = {spec.name: found.row(spec, arch) for spec in found.specs if inventory.runs_on(spec, arch)}
            if pytestconfig.getoption("kernels") != "all" and table(arch).exists():
                rows = json.loads(table(arch).read_text()) | rows
            lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
            table(arch).write_text(f"{{\n{lines}\n}}\n")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "spec" in metafunc.fixturenames:
        specs = metafunc.config.b12x_specs  # type: ignore[attr-defined]
        pairs = [(spec, arch) for arch in ARCHITECTURES for spec in specs if inventory.runs_on(spec, arch)]
        metafunc.parametrize(("spec", "arch"), pairs, ids=[f"{arch}-{spec.name}" for spec, arch in pairs])
    elif "arch" in metafunc.fixturenames:
        metafunc.parametrize("arch", ARCHITECTURES)
