"""Shapes of layers of models that people run: what kernels are planned, compiled, tested and measured for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Numbers of GPUs that a layer is divided among."""

MULTIPROCESSORS = (48, 84, 132, 170, 188)
"""DGX Spark, RTX 5080, H200, RTX 5090, RTX PRO 6000."""

TOKENS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 256, 512, 1024, 2048, 4096, 8192, 65536)
"""Numbers of tokens of a call: decoding of small and large batches, verification, chunks of prompts."""


@dataclass(frozen=True)
class Model:
    """The dense layers of a model, before tensor parallelism.

    Attributes:
        name: as people call it.
        hidden: width of the residual stream.
        ffn: width of dense feed-forward layers and shared experts, 0 for none.
        heads, kv_heads, head_dim: of attention; heads 0 where they are not known.
        v_head_dim: of the values, 0 for head_dim.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0

    def linears(self, gpus: int) -> Iterator[tuple[int, int]]:
        """(N, K) of each linear layer on one of `gpus`. KV heads are repeated where there are fewer than GPUs."""
        value = self.v_head_dim or self.head_dim
        if self.heads:
            queries = -(-self.heads // gpus)
            keys = -(-self.kv_heads // gpus)
            yield queries * self.head_dim + keys * (self.head_dim + value), self.hidden
            yield self.hidden, queries * value
        if self.ffn:
            yield 2 * -(-self.ffn // gpus), self.hidden
            yield self.hidden, -(-self.ffn // gpus)


MODELS = (
    Model("gpt-oss", 2880, 0, 64, 8, 64),
    Model("MiniMax-M2", 3072, 0, 48, 8, 128),
    Model("Qwen3-30B-A3B", 2048, 0, 32, 4, 128),
    Model("Qwen3.5-35B-A3B", 2048, 512, 16, 2, 256),
    Model("Qwen3.5-397B-A17B", 4096, 1024, 32, 2, 256),
    Model("Qwen3.6-27B", 5120, 17408, 24, 4, 256),
    Model("Qwen3.8-Flash-Next", 2560, 640, 0, 0, 256),
    Model("Nemotron-3-Nano", 2688, 1856, 0, 0, 128),
    Model("Nemotron-3-Super", 4096, 2688, 32, 2, 128),
    Model("GLM-5", 6144, 12288, 0, 0, 0),
    Model("DeepSeek-V3", 7168, 2048, 0, 0, 0),
    Model("DeepSeek-V4-Flash", 4096, 2048, 64, 1, 512),
    Model("MiMo-V2-Flash", 4096, 2048, 64, 4, 192, 128),
    Model("Step-3.7", 4096, 1280, 64, 8, 128),
    Model("SmolLM2-135M", 576, 1536, 9, 3, 64),
)
"""Values of the models' configurations. Experts are the mixture's, not listed here."""

BENCHMARKED = ((5120, 17408), (34816, 5120), (2880, 2880), (4096, 14336))
"""(N, K) of the linear benchmarks."""


def linear_shapes() -> list[tuple[int, int]]:
    """Every (N, K), sorted."""
    shapes = set(BENCHMARKED)
    for model in MODELS:
        for gpus in TENSOR_PARALLEL:
            shapes.update(model.linears(gpus))
    return sorted(shapes)
