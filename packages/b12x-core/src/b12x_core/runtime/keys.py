"""The key of a compiled kernel: equal for equal source, configuration, architecture and compiler, everywhere.

Sources are found by reading `import` statements, from the kernel's module on, so that no compiler is imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from pathlib import Path

from b12x_core.errors import ArgumentError
from b12x_core.planning.kernel import KernelSpec

COMPILER = "nvidia-cutlass-dsl"
"""The distribution of the compiler."""

COMPILER_VERSION = "4.8.0"
"""The version that this package pins: what a kernel that was compiled elsewhere was compiled with."""

FORMAT = 1
"""Version of how this runtime compiles, links, stores and calls a kernel."""


def compiler_version() -> str:
    """The version of the compiler: of the installed one, or the pinned one where none is installed."""
    try:
        return importlib.metadata.version(COMPILER)
    except importlib.metadata.PackageNotFoundError:
        return COMPILER_VERSION


@functools.cache
def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentError(f"{package} is not an installed package")
    return Path(next(iter(spec.submodule_search_locations)))


def module_file(module: str) -> Path | None:
    """The source of a module of an installed package, found without importing the module; None if there is none."""
    top, *rest = module.split(".")
    path = _root(top).joinpath(*rest)
    candidates = [path / "__init__.py"] if not rest else [path.with_name(path.name + ".py"), path / "__init__.py"]
    return next((file for file in candidates if file.is_file()), None)


def _imports(module: str, file: Path, tree: ast.Module, tops: frozenset[str]) -> set[str]:
    """The modules of the packages `tops` that a module imports by name, at its top or anywhere else.

    The `__init__` of a package that is only passed on the way to a submodule does not count.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.partition(".")[0] in tops)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            if base.partition(".")[0] in tops:
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    found.add(submodule if module_file(submodule) else base)
    return found


@functools.cache
def _read(module: str, tops: frozenset[str]) -> tuple[str, frozenset[str]]:
    """The digest of a module's text, and what it imports."""
    file = module_file(module)
    if file is None:
        raise ArgumentError(f"no source of the module {module} is installed")
    text = file.read_text(encoding="utf-8")
    imports = _imports(module, file, ast.parse(text), tops)
    return hashlib.sha256(text.encode()).hexdigest(), frozenset(imports)


@functools.cache
def sources(kernel: str, config: str) -> dict[str, str]:
    """Module -> digest of its text, for all that a kernel is made of.

    Args:
        kernel: the module that compiles it.
        config: the module of its configuration, whose properties the kernel may use without importing it.
    """
    tops = frozenset({"b12x_core", kernel.partition(".")[0]})
    digests: dict[str, str] = {}
    waiting = [kernel, *([config] if config.partition(".")[0] in tops else [])]
    while waiting:
        name = waiting.pop()
        if name not in digests:
            digests[name], imports = _read(name, tops)
            waiting.extend(imports)
    return digests


@functools.lru_cache(maxsize=4096)
def key(spec: KernelSpec, arch: str) -> str:
    """The key of a kernel compiled for an architecture, 64 hexadecimal digits.

    Raises:
        ArgumentError: if there is no such kernel module.
    """
    content = {
        "format": FORMAT,
        "arch": arch,
        # the host side of a kernel is machine code too
        "host": platform.machine(),
        "compiler": compiler_version(),
        "kernel": spec.to_json(),
        "sources": sources(spec.module, type(spec.config).__module__),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def forget() -> None:
    """Read sources anew: for tests that change them."""
    for cached in (_root, _read, sources, key):
        cached.cache_clear()
