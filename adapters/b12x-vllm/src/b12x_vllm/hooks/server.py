"""The command line of vLLM's server, for conformance over HTTP."""

from __future__ import annotations

import sys

import torch
from b12x_core.adapter_support import command_line, has_tokenizer
from b12x_core.adapters import ServerCommand, TextEngineOptions

from b12x_vllm.hooks.context import CPU_PLATFORM_SWITCH
from b12x_vllm.hooks.engine import arguments


def command(checkpoint: str, port: int, options: TextEngineOptions) -> ServerCommand:
    """`vllm serve` of a checkpoint folder on 127.0.0.1:port, with every b12x flag set.

    A folder without a tokenizer is served for prompts that are token ids.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", checkpoint]
    argv += ["--host", "127.0.0.1", "--port", str(port), *command_line(arguments(options))]
    if not has_tokenizer(checkpoint):
        argv.append("--skip-tokenizer-init")
    environment = {"VLLM_NO_USAGE_STATS": "1"}
    if torch.device(options.device).type == "cpu":
        environment[CPU_PLATFORM_SWITCH] = "1"
    return ServerCommand(argv=tuple(argv), environment=environment)
