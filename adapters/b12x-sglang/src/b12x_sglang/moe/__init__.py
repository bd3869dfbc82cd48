"""`--moe-runner-backend b12x`: mixtures of experts of every format that SGLang loads, served by `b12x_core.fused_moe`.

- `selection` gives every `FusedMoE` layer the quantization method of `method`.
- `method` lets SGLang's own method create the parameters that a checkpoint is loaded into, and serves the layer.
- `schemes` translates what SGLang says about a layer (its own method, its runner configuration) into the core's values.
- `weights` reads the loaded parameters.
- `runner` is the runner core that SGLang's `MoeRunner` calls.
"""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Make `--moe-runner-backend b12x` mean this package in the current process. May be called again."""
    from b12x_sglang.moe import runner, selection

    runner.register()
    selection.register()


__all__ = ["register"]
