"""Names of kernels, and keys: what they depend on, and what they do not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from b12x_core import ArgumentError
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear import LinearConfig
from b12x_core.runtime import keys
from packaging.requirements import Requirement
from toy_support import ADD, toy
from toys.configs import ToyConfig

LINEAR = KernelSpec("linear_tiled", LinearConfig("tiled", "e4m3", "bf16", "bf16", "end", 128, 64, 2, 4, 2, 2, 1))


def test_a_spec_goes_through_json() -> None:
    assert KernelSpec.from_json(LINEAR.to_json()) == LINEAR
    assert KernelSpec.from_json(ADD.to_json()) == ADD
    assert LINEAR.name == "linear_tiled-" + LINEAR.config.name


@pytest.mark.parametrize("text", ["", "{}", '{"module": "a.b", "config": "toys.configs:Nothing", "fields": {}}'])
def test_malformed_json_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="no kernel is described"):
        KernelSpec.from_json(text)


def test_what_cannot_be_a_configuration_is_refused() -> None:
    @dataclass
    class Mutable:
        name: str = "mutable"

    @dataclass(frozen=True)
    class Nested:
        sizes: tuple[int, ...] = (1,)
        name: str = "nested"

    with pytest.raises(ArgumentError, match="frozen dataclass"):
        KernelSpec("add", Mutable())
    with pytest.raises(ArgumentError, match="sizes"):
        KernelSpec("add", Nested())
    with pytest.raises(ArgumentError, match="file names"):
        toy(note="a/b")


def test_the_key_depends_on_everything_that_makes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> str:
        keys.forget()
        return keys.key(ADD, "sm_90a")

    first = seen()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert seen() == first
    others = [keys.key(ADD, "sm_120a"), keys.key(ADD, "sm_121a"), keys.key(toy(threads=64), "sm_90a")]
    for target, name, value in (
        (keys, "compiler_version", lambda: "4.8.1"),
        (keys, "FORMAT", keys.FORMAT + 1),
        (keys.platform, "machine", lambda: "riscv64"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            others.append(seen())
    assert len({first, *others}) == 1 + len(others)
    assert seen() == first


def test_without_the_compiler_the_pinned_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise keys.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(keys.importlib.metadata, "version", absent)
    assert keys.compiler_version() == keys.COMPILER_VERSION
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (pinned,) = [Requirement(line) for line in project["dependencies"] if line.startswith(keys.COMPILER)]
    assert str(pinned.specifier) == f"=={keys.COMPILER_VERSION}"


SOURCES = {
    "__init__.py": "",
    "top.py": "import cutlass\nfrom written import direct\nfrom written.package.inner import value\n",
    "direct.py": "from .relative import x\nimport written.plain as plain\n",
    "relative.py": "def f():\n    from written.lazy import y\n",
    "plain.py": "",
    "lazy.py": "from b12x_core.planning.linear import LinearConfig\nfrom b12x_core import formats\n",
    "package/__init__.py": "",
    "package/inner.py": "from ..last import z\n",
    "last.py": "from written.package import exported\n",
    "bystander.py": "",
}
FOLLOWED = {"top", "direct", "relative", "plain", "lazy", "package.inner", "last", "package"}


def write(folder: Path) -> None:
    for name, text in SOURCES.items():
        path = folder / "written" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_sources_are_followed_through_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    keys.forget()
    found = set(keys.sources("written.top", "toys.configs"))
    assert {name for name in found if name.startswith("written")} == {f"written.{name}" for name in FOLLOWED}
    # of the core exactly what is imported by name, not what its own __init__ imports
    assert {"b12x_core.planning.linear", "b12x_core.formats"} <= found
    assert "b12x_core" not in found
    assert "b12x_core.ops.linear" not in found


@pytest.mark.parametrize("changed", [name for name in SOURCES if name != "__init__.py"])
def test_a_change_of_what_is_imported_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    spec = KernelSpec("top", ToyConfig(), "written")
    keys.forget()
    before = keys.key(spec, "sm_90a")
    with (tmp_path / "written" / changed).open("a") as file:
        file.write("# changed\n")
    keys.forget()
    assert (keys.key(spec, "sm_90a") != before) == (changed != "bystander.py")


def test_there_is_no_key_without_source() -> None:
    with pytest.raises(ArgumentError, match=r"no source of the module b12x_core\.kernels\.nothing"):
        keys.key(KernelSpec("nothing", ToyConfig()), "sm_90a")


CHILD = """
import json, sys
import b12x_core
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime import keys
print(b12x_core.__file__)
print(json.dumps([keys.key(KernelSpec.from_json(text), "sm_120a") for text in sys.argv[1:]]))
"""


def test_keys_are_equal_in_another_process_and_another_place(tmp_path: Path) -> None:
    """The other process finds the package elsewhere, with other times of modification and another seed of `hash`."""
    import b12x_core

    source = Path(b12x_core.__file__).parent
    subprocess.run(["cp", "-r", source, tmp_path / "b12x_core"], check=True)
    run = subprocess.run(
        [sys.executable, "-c", CHILD, LINEAR.to_json()],
        env={"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    where, answer = run.stdout.splitlines()
    assert Path(where.decode()).is_relative_to(tmp_path)
    assert json.loads(answer) == [keys.key(LINEAR, "sm_120a")]
