"""`--moe-backend b12x`: mixtures of experts of every format that vLLM loads, served by `b12x_core.fused_moe`.

- `schemes` translates what vLLM says about a layer (quantization keys, activation) into the core's values.
- `experts` is the class that vLLM's modular MoE kernel calls.
- `oracles` makes vLLM choose that class, and gives it the layer's weights.
"""

from __future__ import annotations

from b12x_vllm.moe import oracles


def register() -> None:
    """Make `--moe-backend b12x` mean this package in the current process. May be called again.

    With the upstream package of the same name installed as well, the flag still means this one.
    """
    oracles.install()


__all__ = ["register"]
