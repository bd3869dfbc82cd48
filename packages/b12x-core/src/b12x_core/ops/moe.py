"""Mixture of experts: weights prepared once, then routed tokens through both GEMMs and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from b12x_core import counters
from b12x_core.activations import SILU, Activation
from b12x_core.capabilities import Support, supports_moe
from b12x_core.errors import UnsupportedError
from b12x_core.formats import SCHEMES, Scheme
from b12x_core.ops import _checks, _weights
from b12x_core.ops._library import register
from b12x_core.reference import moe as reference

GATE_UP = ("halves", "interleaved")


@dataclass(frozen=True)
class ExpertWeights:
    """Prepared weights of a mixture of experts; made by `prepare_experts`.

    Attributes:
        scheme: formats of weights and activations.
        num_experts, hidden, intermediate: E, H and I.
        gated: whether w13 has 2 * I rows (gate and up) or I.
        interleaved: whether gate and up rows of w13 alternate, or the gate rows come first.
        w13, w13_scale, ...: tensors that the op reads, None where the scheme has none.
    """

    scheme: Scheme
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    interleaved: bool
    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w13_global_scale: torch.Tensor | None
    w13_input_scale: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    w2_global_scale: torch.Tensor | None
    w2_input_scale: torch.Tensor | None
    w2_bias: torch.Tensor | None


def _parts(gated: bool, interleaved: bool) -> int:
    """Runs of rows of w13 with blocks of their own: the gate and the up projection, unless their rows alternate."""
    return 2 if gated and not interleaved else 1


def _prepare_matrix(
    scheme: Scheme,
    name: str,
    parts: int,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Check one of the two stacked weights and what belongs to it; the result is named for `ExpertWeights`."""
    op, fmt, device = "prepare_experts", scheme.weight, weight.device
    experts, rows, k = weight.shape[0], weight.shape[1], weight.shape[2] * fmt.packed
    _weights.check_scheme_scales(op, scheme, f"{name}_", global_scale, input_scale)
    scale = _weights.canonical_scale(op, f"{name}_scale", scale, fmt, (experts,), rows, k, parts)
    if scale is not None and scale.device != device:
        raise _checks.fail(op, f"{name}_scale", f"on {device} like the weights", scale)
    if global_scale is not None:
        argument = f"{name}_global_scale"
        per_row = global_scale.dim() == 2
        shape = (experts, rows) if per_row else (experts,)
        _checks.tensor(op, argument, global_scale, (torch.float32,), shape, "(E,) or (E, rows)", device)
    if input_scale is not None:
        argument = f"{name}_input_scale"
        input_scale = _checks.scalar_or_rows(op, argument, input_scale, (experts,), "(E,)", device)
    if bias is not None:
        dtypes = (*_checks.ACTIVATION_DTYPES, torch.float32)
        _checks.tensor(op, f"{name}_bias", bias, dtypes, (experts, rows), "(E, rows)", device)
    return {
        name: weight,
        f"{name}_scale": scale,
        f"{name}_global_scale": global_scale,
        f"{name}_input_scale": input_scale,
        f"{name}_bias": bias,
    }


def prepare_experts(
    scheme: Scheme,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    *,
    w13_global_scale: torch.Tensor | None = None,
    w2_global_scale: torch.Tensor | None = None,
    w13_input_scale: torch.Tensor | None = None,
    w2_input_scale: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    gate_up: Literal["halves", "interleaved"] = "halves",
    into: ExpertWeights | None = None,
) -> ExpertWeights:
    """Prepare the experts of a layer. Tensors are kept, not copied, where the kernel reads them as they are.

    Args:
        scheme: formats of weights and activations.
        w13: first GEMM, (E, 2 * I, H) for gated experts or (E, I, H), e2m1 packed along H as in `prepare_linear`.
        w2: second GEMM, (E, H, I).
        w13_scale, w2_scale: as `scale` of `prepare_linear` with a leading E; one value an expert for fp8-tensor. The
            blocks of fp8-block start anew at the up rows of halves: (E, 2 * ceil(I/128), ceil(H/128)).
        w13_global_scale, w2_global_scale: nvfp4: fp32 (E,), or (E, rows) with one a row.
        w13_input_scale, w2_input_scale: as `input_scale` of `prepare_linear`, one value or (E,).
        w13_bias, w2_bias: (E, 2 * I or I) and (E, H), bf16, fp16 or fp32.
        gate_up: order of the rows of a gated w13: all gates then all ups, or gate, up, gate, up.
        into: earlier weights of the same scheme and shapes, whose storage is to be filled and which is returned.

    Raises:
        ArgumentError: an argument is malformed.
        UnsupportedError: nothing serves such experts on the weights' device.
    """
    op, fmt = "prepare_experts", scheme.weight
    if gate_up not in GATE_UP:
        raise _checks.fail(op, "gate_up", " or ".join(map(repr, GATE_UP)), gate_up)
    divided = f" / {fmt.packed}" if fmt.packed > 1 else ""
    _weights.check_weight(op, "w13", w13, fmt, 3, f"(E, 2 * I or I, H{divided})")
    _weights.check_weight(op, "w2", w2, fmt, 3, f"(E, H, I{divided})")
    experts, hidden, intermediate = w2.shape[0], w2.shape[1], w2.shape[2] * fmt.packed
    rows = w13.shape[1]
    if (w13.shape[0], w13.shape[2] * fmt.packed) != (experts, hidden) or rows not in (intermediate, 2 * intermediate):
        shapes = (
            f"({experts}, {2 * intermediate} or {intermediate}, {hidden // fmt.packed}) to fit w2 {tuple(w2.shape)}"
        )
        raise _checks.fail(op, "w13", f"of shape {shapes}", w13)
    if w2.device != w13.device:
        raise _checks.fail(op, "w2", f"on {w13.device} like w13", w2)
    gated = rows == 2 * intermediate
    if gate_up == "interleaved" and not gated:
        raise _checks.fail(op, "gate_up", "'halves' for experts that are not gated", gate_up)
    support = supports_moe(scheme, experts, hidden, intermediate, SILU, w13.device)
    if not support.ok:
        raise UnsupportedError(f"{op}: {support.reason}")
    parts = _parts(gated, gate_up == "interleaved")
    first = _prepare_matrix(scheme, "w13", parts, w13, w13_scale, w13_global_scale, w13_input_scale, w13_bias)
    second = _prepare_matrix(scheme, "w2", 1, w2, w2_scale, w2_global_scale, w2_input_scale, w2_bias)
    tensors: dict[str, torch.Tensor | None] = first | second
    fresh = ExpertWeights(
        scheme,
        experts,
        hidden,
        intermediate,
        gated,
        gate_up == "interleaved",
        **tensors,  # type: ignore[arg-type]
    )
    return _weights.store_into(op, fresh, into)


_SCHEMA = """fused_moe(Tensor x, Tensor topk_weights, Tensor topk_ids,
    Tensor w13, Tensor? w13_scale, Tensor? w13_global_scale, Tensor? w13_input_scale, Tensor? w13_bias,
    Tensor w2, Tensor? w2_scale, Tensor? w2_global_scale, Tensor? w2_input_scale, Tensor? w2_bias,
    Tensor? expert_map, Tensor(a!) out, str scheme, str function, bool gated, float alpha, float beta, float? limit,
    bool interleaved, bool router_weight_on_input, float routed_scaling) -> ()"""


def _impl(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w13_global_scale: torch.Tensor | None,
    w13_input_scale: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w2_global_scale: torch.Tensor | None,
    w2_input_scale: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    scheme: str,
    function: str,
    gated: bool,
    alpha: float,
    beta: float,
    limit: float | None,
    interleaved: bool,
    router_weight_on_input: bool,
    routed_scaling: float,
) -> None:
    counters.record("fused_moe", scheme, w13)
    _check_ids(topk_ids, expert_map, w13.shape[0])
    out.copy_(
        reference.fused_moe(
            x,
            topk_weights,
            topk_ids,
            reference.ExpertMatrix(
                w13, w13_scale, w13_global_scale, w13_input_scale, w13_bias, _parts(gated, interleaved)
            ),
            reference.ExpertMatrix(w2, w2_scale, w2_global_scale, w2_input_scale, w2_bias),
            expert_map,
            SCHEMES[scheme],
            Activation(function, gated, alpha, beta, limit),
            interleaved,
            router_weight_on_input,
            routed_scaling,
        )
    )


def _check_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> None:
    """Ids out of range are caught where looking at them is free: on a CPU."""
    if topk_ids.device.type != "cpu" or not topk_ids.numel():
        return
    count = experts if expert_map is None else expert_map.shape[0]
    low, high = int(topk_ids.min()), int(topk_ids.max())
    if low < -1 or high >= count:
        which = "local experts" if expert_map is None else "experts of expert_map"
        raise _checks.fail("fused_moe", "topk_ids", f"from -1 (none) to {count - 1} ({which})", (low, high))


def _support(*args: object) -> Support:
    x, w13, w2, scheme = args[0], args[3], args[8], args[15]
    assert isinstance(x, torch.Tensor)
    assert isinstance(w13, torch.Tensor)
    assert isinstance(w2, torch.Tensor)
    form = SCHEMES[str(scheme)]
    return supports_moe(form, w2.shape[0], w2.shape[1], w2.shape[2] * form.weight.packed, SILU, x.device)


_op = register(_SCHEMA, _impl, lambda *_: None, support=_support)


def fused_moe(
    x: torch.Tensor,
    experts: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation = SILU,
    expert_map: torch.Tensor | None = None,
    router_weight_on_input: bool = False,
    routed_scaling: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over the routes of each token: weight * (activation(x W13^T + b13) W2^T + b2), times routed_scaling.

    Args:
        x: (M, H) bf16 or fp16; M may be 0.
        experts: prepared weights.
        topk_weights: (M, top_k) fp32, bf16 or fp16.
        topk_ids: (M, top_k) int32 or int64. -1: no expert. An id may occur twice in a row.
        activation: between the GEMMs; gated exactly where the weights are.
        expert_map: int32 or int64 (global E,): ids are global, the map gives the local expert or -1 for one that
            another rank holds. None: ids are local.
        router_weight_on_input: the weight multiplies x (rounded to x's dtype) instead of the expert's output.
        routed_scaling: factor of the sum.
        out: (M, H) of x's dtype to write; None allocates.

    Returns:
        (M, H) in x's dtype. Sums are accumulated in float32. Weights of experts that nobody chose are not read.

    Raises:
        ArgumentError: an argument is malformed.
        UnsupportedError: nothing serves the call on x's device.
    """
    op, device = "fused_moe", experts.w13.device
    dtypes = _checks.ACTIVATION_DTYPES if experts.scheme.weight.quantized else (experts.w13.dtype,)
    _checks.tensor(op, "x", x, dtypes, (None, experts.hidden), "(M, H)", device)
    tokens = x.shape[0]
    integers = (torch.int32, torch.int64)
    _checks.tensor(op, "topk_ids", topk_ids, integers, (tokens, None), "(M, top_k)", device)
    weights = (torch.float32, *_checks.ACTIVATION_DTYPES)
    _checks.tensor(op, "topk_weights", topk_weights, weights, (tokens, topk_ids.shape[1]), "(M, top_k)", device)
    if activation.gated != experts.gated:
        expected = f"{'gated' if experts.gated else 'not gated'} like the experts, whose w13 has "
        raise _checks.fail(op, "activation", f"{expected}{experts.w13.shape[1]} rows", activation)
    if expert_map is not None:
        _checks.tensor(op, "expert_map", expert_map, integers, (None,), "(global E,)", device)
    if out is None:
        out = torch.empty_like(x)
    else:
        _checks.tensor(op, "out", out, (x.dtype,), (tokens, experts.hidden), "(M, H)", device)
    _op(
        x,
        topk_weights,
        topk_ids,
        experts.w13,
        experts.w13_scale,
        experts.w13_global_scale,
        experts.w13_input_scale,
        experts.w13_bias,
        experts.w2,
        experts.w2_scale,
        experts.w2_global_scale,
        experts.w2_input_scale,
        experts.w2_bias,
        expert_map,
        out,
        experts.scheme.name,
        activation.function,
        activation.gated,
        activation.alpha,
        activation.beta,
        activation.limit,
        experts.interleaved,
        router_weight_on_input,
        routed_scaling,
    )
    return out
