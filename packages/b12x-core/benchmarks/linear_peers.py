"""Linear layers of others, called as their engines call them, on the data that ours gets.

vLLM's compiled kernels need no vLLM: `B12X_PEER_LIBRARY` names the library to load.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from b12x_core import SCHEMES
from marlin import MarlinWeight

Gemm = Callable[[], torch.Tensor]

FROM_BF16 = "vllm.marlin "
"""What names of peers begin with that take the activation as it comes, whatever the scheme."""


@dataclass(frozen=True)
class Layer:
    """A problem as peers get it: operands quantized by the plain rule of the scheme, (N, K) weights row major.

    Attributes:
        scheme: its name.
        weight: bf16 or e4m3 (N, K), or uint8 (N, K / 2) for e2m1.
        scale: float32: (1,), (N,) or (ceil(N / 128), ceil(K / 128)); e4m3 (N, K / 16) or e8m0 (N, K / 32); None for
            bf16.
        global_scale: float32 (1,) beside e4m3 scales.
    """

    scheme: str
    weight: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None = None

    @property
    def by_blocks(self) -> bool:
        """Whether a row has a scale for each 16 or 32 of K."""
        block = SCHEMES[self.scheme].weight.block
        return block is not None and block[0] == 1 and block[1] in (16, 32)

    @cached_property
    def marlin(self) -> MarlinWeight:
        """The weight as Marlin reads it."""
        assert self.scale is not None
        return MarlinWeight.of(SCHEMES[self.scheme], self.weight, self.scale, self.global_scale)


@dataclass(frozen=True)
class Activation:
    """An activation: as it comes, and quantized (`scale` (1,), (M, 1) or (M, ceil(K / 128)))."""

    x: torch.Tensor
    q: torch.Tensor | None
    scale: torch.Tensor | None


def load_vllm() -> bool:
    """Whether vLLM's operators are there; loads them if need be."""
    library = os.environ.get("B12X_PEER_LIBRARY")
    if library and not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        torch.ops.load_library(library)
    return hasattr(torch.ops._C, "cutlass_scaled_mm")


def _padded(a: Activation) -> Activation:
    """torch._scaled_mm takes 16 rows or more of e4m3."""
    assert a.q is not None
    assert a.scale is not None
    if a.q.shape[0] >= 16:
        return a
    q = torch.zeros((16, a.q.shape[1]), dtype=torch.uint8, device=a.q.device)
    q[: a.q.shape[0]] = a.q.view(torch.uint8)
    scale = a.scale
    if scale.numel() > 1 or a.q.shape[0] == 1:
        scale = torch.ones((16, 1), device=a.q.device) if scale.dim() == 2 else scale
        if a.scale.dim() == 2:
            scale[: a.q.shape[0]] = a.scale
    return Activation(a.x, q.view(torch.float8_e4m3fn), scale)


def gemms(layer: Layer, a: Activation) -> dict[str, Gemm]:
    """Peers' products from an activation that is quantized already (bf16 and Marlin: from the activation itself)."""
    w, x = layer.weight, a.x
    found: dict[str, Gemm] = {}
    if layer.scheme == "bf16":
        return {"torch.mm": lambda: x @ w.t()}
    if layer.by_blocks:
        return {f"{FROM_BF16}{SCHEMES[layer.scheme].weight}": layer.marlin.gemm(x)} if load_vllm() else {}
    if layer.scheme.endswith("w8a16"):
        return {}
    assert a.q is not None
    assert a.scale is not None
    assert layer.scale is not None
    vllm = load_vllm()
    q, scale_x, scale_w = a.q, a.scale, layer.scale
    out = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    if layer.scheme == "fp8-block":
        if vllm and w.shape[0] % 128 == 0 and w.shape[1] % 128 == 0:
            columns, rows = scale_x.t().contiguous().t(), scale_w.t()

            def block() -> torch.Tensor:
                torch.ops._C.cutlass_scaled_mm(out, q, w.t(), columns, rows, None)
                return out

            found["vllm.cutlass_scaled_mm block"] = block
        if importlib.util.find_spec("deep_gemm") is not None and w.shape[1] % 128 == 0:
            found["deep_gemm.fp8_gemm_nt"] = deep_gemm_block(q, scale_x, w, scale_w, out)
        return found
    wide = _padded(a)
    rowwise = layer.scheme == "fp8-channel"
    weight_scale = scale_w.view(1, -1) if rowwise else scale_w.view(())
    token_scale = wide.scale if rowwise else scale_x.view(())
    found[f"torch._scaled_mm {'row' if rowwise else 'tensor'}"] = lambda: torch._scaled_mm(
        wide.q, w.t(), scale_a=token_scale, scale_b=weight_scale, out_dtype=x.dtype, use_fast_accum=True
    )
    if vllm and w.shape[0] % 16 == 0 and w.shape[1] % 16 == 0:
        columns = scale_w.view(-1, 1) if rowwise else scale_w

        def cutlass() -> torch.Tensor:
            torch.ops._C.cutlass_scaled_mm(out, q, w.t(), scale_x, columns, None)
            return out

        found[f"vllm.cutlass_scaled_mm {'row' if rowwise else 'tensor'}"] = cutlass
    return found


def deep_gemm_block(
    q: torch.Tensor, scale_x: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor, out: torch.Tensor
) -> Gemm:
    """DeepGEMM, which compiles a kernel for each shape at its first call."""
    import deep_gemm

    m = q.shape[0]
    columns = torch.empty((scale_x.shape[1], -(-m // 4) * 4), device=q.device).t()[:m]
    columns.copy_(scale_x)

    def call() -> torch.Tensor:
        deep_gemm.fp8_gemm_nt((q, columns), (w, scale_w), out, disable_ue8m0_cast=True)
        return out

    return call


def quantizers(scheme: str, a: Activation) -> dict[str, Gemm]:
    """Peers' quantization of the activation for `scheme`."""
    if a.q is None or not load_vllm():
        return {}
    assert a.scale is not None
    q, scale = torch.empty_like(a.q), a.scale.clone()
    if scheme == "fp8-channel":
        return {"vllm per token": lambda: torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, a.x, scale, None)}
    if scheme == "fp8-tensor":
        return {"vllm static": lambda: torch.ops._C.static_scaled_fp8_quant(q, a.x, scale, None)}
    if scheme == "fp8-block" and a.x.shape[1] % 128 == 0:
        columns = scale.t().contiguous().t()
        return {
            "vllm per group": lambda: torch.ops._C.per_token_group_fp8_quant(
                a.x, q, columns, 128, 1e-10, -448.0, 448.0, False, True, False
            )
        }
    return {}
