"""A kernel whose compilation takes the process with it, as running out of memory does."""

from __future__ import annotations

import os
import signal
import sys

from .configs import ToyConfig


def compile(config: ToyConfig, options: str = ""):
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
