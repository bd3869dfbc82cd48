"""What names a kernel: the module that builds it and the configuration that it is built with."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from b12x_core.errors import ArgumentError

PACKAGE = "b12x_core.kernels"
"""Where the kernel modules are."""

_FILE_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,180}")


class Config(Protocol):
    """A frozen dataclass of plain values: str, int, bool, float or None."""

    @property
    def name(self) -> str:
        """A readable name, unique among the configurations of its kernel, safe in file names."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel: `compile(config)` of the module `package.kernel`.

    Attributes:
        kernel: name of the module.
        config: what it is compiled with.
        package: where the module is.

    Raises:
        ArgumentError: if the configuration is not a frozen dataclass of plain values, or the name is no file name.
    """

    kernel: str
    config: Config
    package: str = PACKAGE

    def __post_init__(self) -> None:
        config: Any = self.config
        params = getattr(config, "__dataclass_params__", None)
        if isinstance(config, type) or params is None or not params.frozen:
            raise ArgumentError(f"the configuration of {self.kernel} must be a frozen dataclass; got {config!r}")
        for field, value in self.fields.items():
            if not isinstance(value, str | int | float | None):
                raise ArgumentError(
                    f"{type(config).__name__}.{field} must be a str, int, bool, float or None; got {value!r}"
                )
        if not _FILE_SAFE.fullmatch(self.name):
            raise ArgumentError(f"the name of a kernel must be safe in file names; got {self.name!r}")

    @property
    def name(self) -> str:
        """A readable name, safe in file names."""
        return f"{self.kernel}-{self.config.name}"

    @property
    def module(self) -> str:
        """Full name of the module that builds the kernel."""
        return f"{self.package}.{self.kernel}"

    @property
    def fields(self) -> dict[str, str | int | float | None]:
        """The configuration as a dictionary."""
        config: Any = self.config
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}

    def to_json(self) -> str:
        """The kernel as one line of JSON: equal for equal kernels."""
        kind = type(self.config)
        return json.dumps(
            {
                "module": self.module,
                "config": f"{kind.__module__}:{kind.__qualname__}",
                "fields": self.fields,
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """The kernel that `to_json` wrote.

        Raises:
            ArgumentError: if the text is malformed or names no configuration that exists.
        """
        try:
            value = json.loads(text)
            package, _, kernel = value["module"].rpartition(".")
            module, _, kind = value["config"].partition(":")
            config = getattr(importlib.import_module(module), kind)(**value["fields"])
        except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise ArgumentError(f"no kernel is described by {text!r}: {type(error).__name__}: {error}") from error
        return cls(kernel, config, package)
