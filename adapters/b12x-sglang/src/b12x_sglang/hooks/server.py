"""The command line of SGLang's server, for conformance over HTTP."""

from __future__ import annotations

import sys

import torch
from b12x_core.adapter_support import command_line, has_tokenizer
from b12x_core.adapters import ServerCommand, TextEngineOptions

from b12x_sglang.hooks.context import CPU_ENGINE
from b12x_sglang.hooks.engine import arguments


def command(checkpoint: str, port: int, options: TextEngineOptions) -> ServerCommand:
    """`python -m sglang.launch_server` of a checkpoint folder on 127.0.0.1:port, with every b12x flag set.

    A folder without a tokenizer is served for prompts that are token ids.
    """
    chosen = arguments(options)
    # The flags are called otherwise than the fields behind them.
    for kind in ("fp8", "fp4"):
        chosen[f"{kind}_gemm_backend"] = chosen.pop(f"{kind}_gemm_runner_backend")
    if not has_tokenizer(checkpoint):
        chosen["skip_tokenizer_init"] = True
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", checkpoint]
    argv += ["--host", "127.0.0.1", "--port", str(port), *command_line(chosen)]
    on_cpu = torch.device(options.device).type == "cpu"
    return ServerCommand(argv=tuple(argv), environment={CPU_ENGINE: "1"} if on_cpu else {})
