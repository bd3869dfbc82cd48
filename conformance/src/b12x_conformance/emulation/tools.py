"""Running nvcc, ptxas and the C compiler, which only emulation needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from b12x_conformance.emulation.errors import ToolError, ToolMissingError

_FROM = {
    "nvcc": "CUDA toolkit 13",
    "ptxas": "CUDA toolkit 13",
    "cc": "C compiler, such as gcc",
}


def find(name: str) -> str:
    """Path of a program: in PATH, else in `bin` of CUDA_HOME, CUDA_PATH or /usr/local/cuda.

    Raises:
        ToolMissingError: it is in none of them.
    """
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(toolkit, "bin")) for toolkit in toolkits if toolkit]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise ToolMissingError(f"{name} ({_FROM[name]}) is neither in PATH nor in {', '.join(folders)}")
    return found


def run(name: str, *arguments: str | Path, folder: Path | None = None) -> str:
    """Run a program; returns what it printed.

    Raises:
        ToolMissingError: it is not installed.
        ToolError: it failed; the message is what it printed.
    """
    command = [find(name), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    if done.returncode:
        raise ToolError(f"{' '.join(command)}\n{printed.strip()}")
    return printed
