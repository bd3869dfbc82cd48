"""vLLM's Marlin kernels, which multiply 16-bit activations by weights of 4 or 8 bits with block scales.

They are what engines run such checkpoints with on GPUs whose matrix instructions take no block scales. Weights are laid
out by vLLM's own operator; this module brings scales into the order and the code that the kernels expect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from b12x_core import Scheme
from b12x_core.formats import Element, ScaleType

_LOCKS_A_MULTIPROCESSOR = 4


def _type_id(exponent: int, mantissa: int, nan: int) -> int:
    """How vLLM's operators number a signed type without infinities: 0 for one without NaN, 2 for one with it."""
    return exponent | mantissa << 8 | 1 << 16 | 1 << 49 | nan << 50


_TYPES = {Element.E2M1: _type_id(2, 1, 0), Element.E4M3: _type_id(4, 3, 2)}


def _scale_order(scales: torch.Tensor) -> torch.Tensor:
    """(blocks of K, N) bytes: of 64 columns the 8 x 8 transposed, and of each four the middle two exchanged."""
    squares = scales.unflatten(1, (-1, 8, 8)).transpose(2, 3).flatten(1)
    return squares.unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1).contiguous()


def _e4m3_codes(scales: torch.Tensor) -> tuple[torch.Tensor, float]:
    """e4m3 scales in the kernels' code, five bits of exponent and three of mantissa; and how much larger they are."""
    values = scales.view(torch.float8_e4m3fn).float()
    larger = 2.0 ** math.floor(math.log2(448 / max(values.max().item(), 2.0**-9)))
    wide = (values * larger * 2**7).half()
    wide = torch.where(wide < 2, torch.zeros_like(wide), wide)
    return (wide.view(torch.int16) << 1).view(torch.uint8)[:, 1::2].contiguous(), larger


@dataclass(frozen=True)
class MarlinWeight:
    """A weight as the kernels read it; N may be padded to a multiple of 128."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    locks: torch.Tensor
    kind: int
    n: int
    padded: int
    k: int

    @classmethod
    def of(
        cls, scheme: Scheme, weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None
    ) -> MarlinWeight:
        """Lay out a stored weight.

        Args:
            scheme: its formats.
            weight: (N, K / 2) uint8 or (N, K) e4m3, K a multiple of 64, N of 64 or K of 128.
            scale: (N, K / 16) e4m3 or (N, K / 32) e8m0.
            global_scale: float32, one value, for e4m3 scales.
        """
        fmt = scheme.weight
        n, k = weight.shape[0], weight.shape[1] * fmt.packed
        padded = n if n % 64 == 0 and k % 128 == 0 else -(-n // 128) * 128
        pad = (0, 0, 0, padded - n)
        stored = torch.nn.functional.pad(weight.view(torch.uint8), pad)
        plain = torch.nn.functional.pad(scale.view(torch.uint8), pad).t().contiguous()
        bits = 8 // fmt.packed
        codes = torch.ops._C.gptq_marlin_repack(stored.view(torch.int32).t().contiguous(), k, padded, bits, False)
        whole = None
        if fmt.scale is ScaleType.E4M3:
            plain, larger = _e4m3_codes(plain)
            assert global_scale is not None
            whole = (global_scale.float() * 2.0**119 / larger).reshape(())  # what bf16 decoding of e2m1 lacks, and 2^-7
        count = torch.cuda.get_device_properties(weight.device).multi_processor_count
        locks = torch.zeros(count * _LOCKS_A_MULTIPROCESSOR, dtype=torch.int32, device=weight.device)
        kind = torch.float8_e4m3fn if fmt.scale is ScaleType.E4M3 else torch.float8_e8m0fnu
        return cls(codes, _scale_order(plain).view(kind), whole, locks, _TYPES[fmt.element], n, padded, k)

    def gemm(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The product with bf16 (M, K)."""
        m = x.shape[0]

        def call() -> torch.Tensor:
            y: torch.Tensor = torch.ops._C.marlin_gemm(
                *(x, None, self.codes, None, self.scales, None, self.global_scale, None),
                *(self.locks, self.kind, m, self.padded, self.k),
                *(False, True, False),  # no atomic sums; sums of blocks in fp32; no zero points in floating point
            )
            return y if self.padded == self.n else y[:, : self.n]

        return call
