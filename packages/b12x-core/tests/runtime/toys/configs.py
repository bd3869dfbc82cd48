"""The configuration of every toy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToyConfig:
    """Attributes: addend: what is added; threads: of a block; note: anything."""

    addend: int = 1
    threads: int = 128
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.addend}-t{self.threads}" + (f"-{self.note}" if self.note else "")
