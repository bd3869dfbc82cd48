"""What the adapters of engines have in common, so that an adapter holds what its engine alone needs.

`b12x_core.adapters` says what an adapter offers; nothing there or in the conformance suite depends on this module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from b12x_core.adapters import (
    AdapterInfo,
    AttentionCase,
    AttentionLayer,
    Case,
    LinearCase,
    LinearLayer,
    MoECase,
    MoELayer,
    ServerCommand,
    TextEngine,
    TextEngineOptions,
    hookimpl,
)
from b12x_core.errors import ArgumentError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""Files of a checkpoint folder of which a tokenizer has at least one."""


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def unserved(distribution: str, engine: str, serves: str) -> str | None:
    """Why an adapter does not serve the engine that is installed (one sentence), None if it does.

    Args:
        distribution: the engine's distribution ("vllm").
        engine: the engine's own name ("vLLM").
        serves: version specifier (PEP 440) of the versions that the adapter was proven with.
    """
    version = installed(distribution)
    if version is None:
        return f"{engine} is not installed"
    if not SpecifierSet(serves).contains(version, prereleases=True):
        return f"this version serves {engine} {serves}, installed is {version}: install a matching pair"
    return None


def register_kinds(package: str, kinds: Sequence[str], engine: str) -> str | None:
    """Put every kind of layer behind the engine's flags, or none: one sentence why not, None if it was done.

    Every module is imported before the first one registers, so that an interface that the engine lacks, which shows
    when a module is imported, leaves the engine as it was.

    Args:
        package: the adapter's import name.
        kinds: modules of it, each with a function `register()`.
        engine: the engine's own name.
    """
    try:
        modules = [importlib.import_module(f"{package}.{kind}") for kind in kinds]
    except ImportError as error:
        return f"{engine} lacks an interface that the adapter needs ({error})"
    for module in modules:
        module.register()
    return None


class EngineHooks:
    """The hooks of an adapter (`b12x_core.adapters.AdapterSpec`), each served by a module of a package.

    A module is imported when its hook is called. `linear`, `moe` and `attention` have `build(case)`, `engine` has
    `start(checkpoint, options)` and `server` has `command(checkpoint, port, options)`. Where the engine has limits, a
    layer's module has `cannot_express(case)`, and `engine` has `cannot_express(options, checkpoint)`.

    Args:
        package: import name of the package that holds the modules.
        name, engine, serves: as in `AdapterInfo`.
        distribution: the engine's distribution.
        prepare: called with a case's device before a module is imported, to make the engine ready for it.
    """

    _MODULES: Mapping[type, str] = {
        LinearCase: "linear",
        MoECase: "moe",
        AttentionCase: "attention",
        TextEngineOptions: "engine",
    }

    def __init__(
        self, package: str, *, name: str, engine: str, distribution: str, serves: str, prepare: Callable[[str], None]
    ) -> None:
        self._package, self._prepare = package, prepare
        self._distribution = distribution
        self._name, self._engine, self._serves = name, engine, serves

    def _module(self, case: Case | TextEngineOptions) -> Any:
        """The module that serves a case, imported once the engine is ready for the case's device."""
        self._prepare(case.device)
        return importlib.import_module(f"{self._package}.{self._MODULES[type(case)]}")

    @hookimpl
    def b12x_adapter_info(self) -> AdapterInfo:
        """See `AdapterSpec`."""
        return AdapterInfo(self._name, self._engine, self._serves, installed(self._distribution))

    @hookimpl
    def b12x_cannot_express(self, case: Case | TextEngineOptions, checkpoint: str | None) -> str | None:
        """See `AdapterSpec`. A module without limits says nothing."""
        limits: Callable[..., str | None] | None = getattr(self._module(case), "cannot_express", None)
        if limits is None:
            return None
        return limits(case, checkpoint) if isinstance(case, TextEngineOptions) else limits(case)

    @hookimpl
    def b12x_linear_layer(self, case: LinearCase) -> LinearLayer:
        """See `AdapterSpec`."""
        layer: LinearLayer = self._module(case).build(case)
        return layer

    @hookimpl
    def b12x_moe_layer(self, case: MoECase) -> MoELayer:
        """See `AdapterSpec`."""
        layer: MoELayer = self._module(case).build(case)
        return layer

    @hookimpl
    def b12x_attention_layer(self, case: AttentionCase) -> AttentionLayer:
        """See `AdapterSpec`."""
        layer: AttentionLayer = self._module(case).build(case)
        return layer

    @hookimpl
    def b12x_text_engine(self, checkpoint: str, options: TextEngineOptions) -> TextEngine:
        """See `AdapterSpec`."""
        engine: TextEngine = self._module(options).start(checkpoint, options)
        return engine

    @hookimpl
    def b12x_server_command(self, checkpoint: str, port: int, options: TextEngineOptions) -> ServerCommand:
        """See `AdapterSpec`."""
        server: Any = importlib.import_module(f"{self._package}.server")
        command: ServerCommand = server.command(checkpoint, port, options)
        return command


@contextmanager
def restored_environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while, and leave all of them as they were.

    Engines set some as they start (LD_PRELOAD, for one) that would reach every process started later.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as a command line spells them: {"page_size": 16, "eager": True} -> --page-size 16 --eager.

    A mapping becomes JSON. None leaves an option out.

    Raises:
        ArgumentError: an argument is False, which engines spell in different ways.
    """
    argv: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            raise ArgumentError(f"command_line: {name} must be left out or have the engine's flag for it; got False")
        if value is True:
            argv.append(flag)
        elif value is not None:
            argv += [flag, json.dumps(dict(value)) if isinstance(value, Mapping) else str(value)]
    return argv


def has_tokenizer(checkpoint: str) -> bool:
    """Whether a checkpoint folder has a tokenizer. One without is served for prompts that are token ids."""
    return any((Path(checkpoint) / name).exists() for name in TOKENIZER_FILES)
