"""Warm-up: have vLLM run a layer's op before it serves, so that nothing is compiled or created during a request.

vLLM walks the modules of a loaded model before it captures graphs (on SM12x GPUs only), asks each one's
`b12x_warmup_provider` for a unit of work, drops units whose key it has seen and runs the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.utils.b12x import B12xWarmupUnit

Run = Callable[[int, torch.dtype], object]


@dataclass(frozen=True)
class WarmUp:
    """The `b12x_warmup_provider` of one layer.

    Attributes:
        name: kind of layer, for vLLM's log line ("linear").
        key: equal for layers that share every kernel: scheme, shape, what else chooses one.
        run: calls the layer's op once on dummy input: (tokens, activation dtype) -> anything.
    """

    name: str
    key: Hashable
    run: Run

    def get_b12x_warmup_unit(
        self, layer: torch.nn.Module, token_counts: tuple[int, ...], output_dtype: torch.dtype
    ) -> B12xWarmupUnit:
        """The unit that runs the op once for every token count that vLLM will serve (called by vLLM).

        A kernel is chosen by token count, so each count is run; the largest comes first, so that whatever grows with
        the count is created once. An op that needs no preparation costs one launch a count.
        """
        from vllm.utils.b12x import B12xWarmupUnit

        def compile_all() -> None:
            for tokens in sorted(set(token_counts), reverse=True):
                self.run(tokens, output_dtype)

        return B12xWarmupUnit(self.name, (self.name, self.key, token_counts, output_dtype), compile_all)


def attach(layer: torch.nn.Module, name: str, key: Hashable, run: Run) -> None:
    """Have vLLM warm up a layer. Call it again when weights were replaced: the last one counts.

    Args:
        layer: module of the model that vLLM finds the provider on.
        name, key, run: as in `WarmUp`.
    """
    layer.b12x_warmup_provider = WarmUp(name, key, run)  # type: ignore[assignment]
