"""From tensors as a checkpoint stores them, a projection each, to the prepared weights of the layer that fuses them.

Engines fuse the projections of one input (q, k and v; gate and up; gate and up of every expert) into one matrix, and
then find a scale a projection where an op takes one a tensor. Going on with the largest multiplies the other
projections by a wrong number, and quantizing them again to it rounds them twice. A scale a row is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from b12x_core.environment import FORCE_A16
from b12x_core.errors import ArgumentError
from b12x_core.formats import FP8_ROW, FP8_TENSOR, Scheme
from b12x_core.ops import _checks
from b12x_core.ops.linear import LinearWeights, prepare_linear
from b12x_core.ops.moe import ExpertWeights, prepare_experts


def serving_scheme(scheme: Scheme) -> Scheme:
    """The scheme to serve a checkpoint's scheme with: itself, or with 16-bit activations if `B12X_FORCE_A16=1`."""
    return scheme.with_16_bit_activations() if FORCE_A16.enabled() else scheme


def scale_per_row(scales: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """One scale for each row of a fused weight, from one a projection. Looks at no value on the host.

    Args:
        scales: (P,) of any dtype.
        rows: rows of each of the P projections, N in all.

    Returns:
        (N,) of the dtype of `scales`.

    Raises:
        ArgumentError: `scales` does not hold one value for each of `rows`.
    """
    if scales.shape != (len(rows),):
        raise _checks.fail("scale_per_row", "scales", f"of shape ({len(rows)},), one a projection", scales)
    counts = torch.tensor(rows, device=scales.device)
    return scales.repeat_interleave(counts, output_size=sum(rows))


def expert_scale_per_row(scales: torch.Tensor, rows: int, *, interleaved: bool) -> torch.Tensor:
    """One scale for each row of w13, from one a projection.

    Args:
        scales: (E, P): of gate and up, or of the only projection.
        rows: rows of w13, a multiple of P.
        interleaved: whether the rows of the projections alternate, or those of the first come first.

    Returns:
        (E, rows) of the dtype of `scales`.

    Raises:
        ArgumentError: the rows cannot be divided among the projections.
    """
    if scales.dim() != 2 or not scales.shape[1] or rows % scales.shape[1]:
        raise _checks.fail("expert_scale_per_row", "scales", f"of shape (E, P) where P divides {rows} rows", scales)
    each = rows // scales.shape[1]
    return scales.repeat(1, each) if interleaved else scales.repeat_interleave(each, dim=1)


def lost_block_scales(engine: str, rows: Sequence[int], ranks: int = 1) -> str | None:
    """Why an engine's loader loses FP8 block scales of fused projections (one sentence), None if it keeps them.

    vLLM and the engines that share its parameter classes lay the scales of all projections on one grid of 128 rows.
    Where a projection starts between its lines, they drop or overwrite some.

    Args:
        engine: its name.
        rows: of each projection, on one rank.
        ranks: over which the layer is split. On one, the last projection may end anywhere: nothing follows it.
    """
    if len(rows) > 1 and any(count % 128 for count in (rows if ranks > 1 else rows[:-1])):
        return (
            f"{engine} cannot load block scales of fused projections with {list(rows)} rows a rank: "
            "each projection needs a multiple of 128 rows"
        )
    return None


def prepare_projections(
    scheme: Scheme,
    rows: Sequence[int],
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    global_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    into: LinearWeights | None = None,
) -> LinearWeights:
    """`prepare_linear` for the projections of one layer, with the scales that a checkpoint stores for each of them.

    Scales of P > 1 projections are widened to one a row even if they are equal: that costs 4 bytes a row, no look at a
    value on the host, and keeps the form of the weights when unequal ones are loaded in their place.

    Args:
        scheme: the checkpoint's; served is `serving_scheme` of it.
        rows: rows of each of the P projections, N in all.
        weight: as in `prepare_linear`, the projections one below the other.
        scale: as in `prepare_linear`; fp8-tensor: fp32 (P,), one a projection, or one value for all. With one a
            projection and P > 1 the weights become fp8-channel.
        global_scale: nvfp4: fp32 multipliers, one value, (P,) or (N,).
        input_scale: fp32 multipliers, one value or (P,): all projections read one activation, which is quantized once,
            and the largest scale saturates for none. Not used where the scheme served has no static scale.
        bias: as in `prepare_linear`.
        into: what an earlier call returned, whose storage is to be filled and which is returned.

    Raises:
        ArgumentError: an argument is malformed.
        UnsupportedError: nothing serves such a layer on the weight's device.
    """
    op = "prepare_projections"
    if sum(rows) != weight.shape[0]:
        raise ArgumentError(f"{op}: rows must add up to the {weight.shape[0]} rows of weight; got {list(rows)}")
    if scheme.weight == FP8_TENSOR and scale is not None:
        by_row = into is not None and into.scheme.weight == FP8_ROW
        if by_row or scale.numel() > 1:
            scheme = Scheme(FP8_ROW, scheme.activation)
            scale = _by_row(op, "scale", scale, rows)
    elif global_scale is not None:
        by_row = into is not None and into.global_scale is not None and into.global_scale.numel() > 1
        if by_row or global_scale.numel() > 1:
            global_scale = _by_row(op, "global_scale", global_scale, rows)
    if input_scale is not None and input_scale.numel() > 1:
        if input_scale.numel() != len(rows):
            expected = f"of one value or of shape ({len(rows)},), one a projection"
            raise _checks.fail(op, "input_scale", expected, input_scale)
        input_scale = input_scale.amax()
    scheme = serving_scheme(scheme)
    return prepare_linear(
        scheme,
        weight,
        scale,
        global_scale=global_scale,
        input_scale=None if scheme.static_activation_scale is False else input_scale,
        bias=bias,
        into=into,
    )


def _by_row(op: str, argument: str, scale: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A scale for all, one a projection or one a row -> (N,)."""
    n = sum(rows)
    if scale.numel() == 1:
        return scale.reshape(1).repeat(n)
    if scale.shape == (n,):
        return scale
    if scale.shape != (len(rows),):
        raise _checks.fail(op, argument, f"of one value or of shape ({len(rows)},), one a projection", scale)
    return scale_per_row(scale, rows)


def prepare_expert_projections(
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
    """`prepare_experts` with the scales that a checkpoint stores for gate and up of each expert.

    The P projections of w13 are gate and up, or the only one of experts that are not gated.

    Args:
        scheme: the checkpoint's; served is `serving_scheme` of it.
        w13, w2: as in `prepare_experts`.
        w13_scale: as in `prepare_experts`; fp8-tensor: fp32 (E,) or (E, P). Where the scales of an expert differ, all
            weights become fp8-channel, which is the same arithmetic. That is found out on the host.
        w2_scale: as in `prepare_experts`.
        w13_global_scale: nvfp4: fp32 multipliers (E,), (E, P) or (E, rows of w13).
        w2_global_scale: as in `prepare_experts`.
        w13_input_scale: fp32 multipliers, one value, (E,) or (E, P): gate and up read one activation, which is
            quantized once, and the larger scale saturates for neither. As w2_input_scale, not used where the scheme
            served has no static scale.
        w2_input_scale, w13_bias, w2_bias, gate_up: as in `prepare_experts`.
        into: what an earlier call returned, whose storage is to be filled and which is returned.

    Raises:
        ArgumentError: an argument is malformed; also where `into` was prepared with equal fp8-tensor scales of gate and
            up and the new ones differ.
        UnsupportedError: nothing serves such experts on the weights' device.
    """
    op, rows, interleaved = "prepare_expert_projections", w13.shape[1], gate_up == "interleaved"
    parts = 2 if rows == 2 * w2.shape[2] * scheme.weight.packed else 1

    def fits(argument: str, value: torch.Tensor | None) -> bool:
        """Whether there is one value a projection."""
        if value is None or value.dim() != 2:
            return False
        if value.shape[1] not in (1, parts):
            raise _checks.fail(op, argument, f"of shape (E,) or (E, {parts}), one a projection", value)
        return True

    if scheme.weight == FP8_TENSOR and w13_scale is not None and w2_scale is not None:
        each = w13_scale if fits("w13_scale", w13_scale) else w13_scale.reshape(-1, 1)
        by_row = into is not None and into.scheme.weight == FP8_ROW
        if by_row or not torch.equal(each, each[:, :1].expand_as(each)):
            scheme = Scheme(FP8_ROW, scheme.activation)
            w13_scale = expert_scale_per_row(each, rows, interleaved=interleaved)
            w2_scale = expert_scale_per_row(w2_scale.reshape(-1, 1), w2.shape[1], interleaved=False)
        else:
            w13_scale = each[:, 0].contiguous()
    per_row = w13_global_scale is not None and w13_global_scale.shape[1:] == (rows,)
    if w13_global_scale is not None and not per_row and fits("w13_global_scale", w13_global_scale):
        w13_global_scale = expert_scale_per_row(w13_global_scale, rows, interleaved=interleaved)
    if w13_input_scale is not None and fits("w13_input_scale", w13_input_scale):
        w13_input_scale = w13_input_scale.amax(dim=1)
    scheme = serving_scheme(scheme)
    static = scheme.static_activation_scale is not False
    return prepare_experts(
        scheme,
        w13,
        w13_scale,
        w2,
        w2_scale,
        w13_global_scale=w13_global_scale,
        w2_global_scale=w2_global_scale,
        w13_input_scale=w13_input_scale if static else None,
        w2_input_scale=w2_input_scale if static else None,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        gate_up=gate_up,
        into=into,
    )
