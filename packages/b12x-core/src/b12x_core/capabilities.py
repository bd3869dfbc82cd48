"""What runs where, as data: the only source of gates, of the sentences of refusals, and of the table in the docs.

A *tier* is a class of devices. `KERNELS` lists what serves an op in a scheme on a tier; what it does not list is
refused. Limits on shapes that belong to a format follow from `b12x_core.formats`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from b12x_core import environment
from b12x_core.activations import Activation
from b12x_core.formats import SCHEMES, Scheme
from b12x_core.planning.linear_operands import operands


class Tier(enum.Enum):
    """A class of devices that run the same kernels."""

    NATIVE = "native"
    PORTABLE = "portable"
    REFERENCE = "reference"

    @property
    def targets(self) -> str:
        """The devices of the tier, for people."""
        return {
            "native": "SM120, SM121 (RTX PRO 6000, RTX 5090, DGX Spark)",
            "portable": "SM90 (H100, H200)",
            "reference": "CPU; any device with B12X_REFERENCE=1",
        }[self.value]


class Op(enum.Enum):
    """An op that can be served."""

    LINEAR = "linear"
    MOE = "fused_moe"
    ATTENTION = "paged_attention"
    KV_CACHE = "write_kv_cache"


@dataclass(frozen=True)
class Support:
    """Whether a request is served.

    Attributes:
        ok: whether it is.
        reason: one sentence why not, None if it is.
        kernel: what serves it, None if nothing does.
    """

    ok: bool
    reason: str | None = None
    kernel: str | None = None


@dataclass(frozen=True)
class Kernel:
    """A row of the table: `name` serves `op` in `schemes` on `tier`.

    For attention and the KV cache a scheme is the storage of keys and values, by dtype name.
    """

    name: str
    op: Op
    tier: Tier
    schemes: tuple[str, ...]


KV_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Storage of keys and values."""

HEAD_DIMS = (16, 512)
"""Least and largest head dim, of multiples of 8."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as schemes and counters name it."""
    return str(dtype).removeprefix("torch.")


_KV_SCHEMES = tuple(dtype_name(dtype) for dtype in KV_DTYPES)

REFERENCE_LINEAR = "reference.linear"
_ARCHITECTURES = {Tier.NATIVE: "sm_120a", Tier.PORTABLE: "sm_90a"}
"""What kernels of a tier are compiled for, as far as it matters to which of them serves a scheme."""

KERNELS: tuple[Kernel, ...] = (
    *(
        Kernel(operands(scheme, arch).kernel, Op.LINEAR, tier, (name,))
        for tier, arch in _ARCHITECTURES.items()
        for name, scheme in SCHEMES.items()
    ),
    Kernel(REFERENCE_LINEAR, Op.LINEAR, Tier.REFERENCE, tuple(SCHEMES)),
    Kernel("reference.fused_moe", Op.MOE, Tier.REFERENCE, tuple(SCHEMES)),
    Kernel("reference.paged_attention", Op.ATTENTION, Tier.REFERENCE, _KV_SCHEMES),
    Kernel("reference.write_kv_cache", Op.KV_CACHE, Tier.REFERENCE, _KV_SCHEMES),
)
"""Everything that exists."""

_TIER_OF_CAPABILITY = {(12, 0): Tier.NATIVE, (12, 1): Tier.NATIVE, (9, 0): Tier.PORTABLE}


def tier_of(device: torch.device | str) -> tuple[Tier | None, str]:
    """The tier of a device and the device in words; None for one that no kernel targets."""
    device = torch.device(device)
    if device.type == "cpu" or environment.REFERENCE.enabled():
        return Tier.REFERENCE, f"{device.type} (reference)"
    if device.type != "cuda":
        return None, device.type
    major, minor = torch.cuda.get_device_capability(device)
    return _TIER_OF_CAPABILITY.get((major, minor)), f"compute capability {major}.{minor}"


def find(op: Op, scheme: str, device: torch.device | str) -> Support:
    """What serves `op` in `scheme` on a device, whatever the shapes."""
    tier, where = tier_of(device)
    for kernel in KERNELS:
        if kernel.op is op and kernel.tier is tier and scheme in kernel.schemes:
            return Support(True, None, kernel.name)
    served = sorted({other.value for other in Tier for kernel in KERNELS if kernel.op is op and kernel.tier is other})
    return Support(
        False,
        f"no {op.value} kernel for {scheme} on {where}; this version has it on: {', '.join(served)} "
        "(B12X_REFERENCE=1 runs plain torch on any device)",
    )


def _k_reason(scheme: Scheme, name: str, k: int) -> str | None:
    multiple = max(scheme.weight.k_multiple, scheme.activation.k_multiple, scheme.weight.packed)
    if k % multiple:
        return f"{scheme} needs {name} to be a multiple of {multiple}, the block that shares a scale; got {k}"
    return None


def _sizes_reason(**sizes: int) -> str | None:
    for name, size in sizes.items():
        if size < 1:
            return f"{name} must be at least 1; got {size}"
    return None


def supports_linear(scheme: Scheme, n: int, k: int, device: torch.device | str) -> Support:
    """Whether a linear layer with an (n, k) weight is served on a device."""
    reason = _sizes_reason(N=n, K=k) or _k_reason(scheme, "K", k)
    return Support(False, reason) if reason else find(Op.LINEAR, scheme.name, device)


def supports_moe(
    scheme: Scheme, num_experts: int, hidden: int, intermediate: int, activation: Activation, device: torch.device | str
) -> Support:
    """Whether a mixture of `num_experts` experts of H = hidden and I = intermediate is served on a device."""
    del activation  # every activation that can be constructed is served
    reason = (
        _sizes_reason(num_experts=num_experts, hidden=hidden, intermediate=intermediate)
        or _k_reason(scheme, "the hidden size", hidden)
        or _k_reason(scheme, "the intermediate size", intermediate)
    )
    return Support(False, reason) if reason else find(Op.MOE, scheme.name, device)


def supports_attention(
    *,
    head_dim: int,
    page_size: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device | str,
    v_head_dim: int | None = None,
) -> Support:
    """Whether paged attention over such a KV cache is served on a device."""
    for name, size in (("head_dim", head_dim), ("v_head_dim", head_dim if v_head_dim is None else v_head_dim)):
        if size % 8 or not HEAD_DIMS[0] <= size <= HEAD_DIMS[1]:
            return Support(False, f"{name} must be a multiple of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}; got {size}")
    if page_size < 1:
        return Support(False, f"page_size must be at least 1 token; got {page_size}")
    if q_dtype not in (torch.bfloat16, torch.float16):
        return Support(False, f"queries must be bfloat16 or float16; got {dtype_name(q_dtype)}")
    if kv_dtype not in KV_DTYPES or (kv_dtype.itemsize == 2 and kv_dtype != q_dtype):
        choices = (dtype_name(q_dtype), *(dtype_name(dtype) for dtype in KV_DTYPES if dtype.itemsize == 1))
        return Support(
            False,
            f"a KV cache beside {dtype_name(q_dtype)} queries holds {', '.join(choices)}; got {dtype_name(kv_dtype)}",
        )
    return find(Op.ATTENTION, dtype_name(kv_dtype), device)


@dataclass(frozen=True)
class SupportRow:
    """A row of the support table: an op and a scheme, and for each tier the kernel that serves it, or None."""

    op: Op
    scheme: str
    kernels: dict[Tier, str | None]


def support_table() -> list[SupportRow]:
    """The support table: every op in every scheme."""
    rows = []
    for op in Op:
        schemes = tuple(SCHEMES) if op in (Op.LINEAR, Op.MOE) else _KV_SCHEMES
        for scheme in schemes:
            kernels = {
                tier: next((k.name for k in KERNELS if k.op is op and k.tier is tier and scheme in k.schemes), None)
                for tier in Tier
            }
            rows.append(SupportRow(op, scheme, kernels))
    return rows
