"""The command line of vLLM's server, for conformance over HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from b12x_core.adapters import ServerCommand, TextEngineOptions

from b12x_vllm.hooks.context import CPU_PLATFORM_SWITCH
from b12x_vllm.hooks.engine import arguments

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def command(checkpoint: str, port: int, options: TextEngineOptions) -> ServerCommand:
    """`vllm serve` of a checkpoint folder on 127.0.0.1:port, with every b12x flag set.

    A folder without a tokenizer is served for prompts that are token ids.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", checkpoint]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in arguments(options).items():
        argv += _flag(name, value)
    if not any((Path(checkpoint) / name).exists() for name in _TOKENIZER_FILES):
        argv.append("--skip-tokenizer-init")
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if torch.device(options.device).type == "cpu":
        environment[CPU_PLATFORM_SWITCH] = "1"
    return ServerCommand(argv=tuple(argv), environment=environment)


def _flag(name: str, value: Any) -> list[str]:
    """An engine argument as the command line spells it."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
