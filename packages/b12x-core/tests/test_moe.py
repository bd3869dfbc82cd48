"""Mixture of experts against a loop over tokens and routes."""

from __future__ import annotations

import math

import pytest
import torch
from b12x_core import (
    FP8_BLOCK,
    FP8_TENSOR,
    GELU,
    GELU_NOT_GATED,
    GELU_TANH,
    GELU_TANH_NOT_GATED,
    RELU2,
    RELU2_NOT_GATED,
    SCHEMES,
    SILU,
    SILU_NOT_GATED,
    Activation,
    ArgumentError,
    ExpertWeights,
    Scheme,
    SwiGLU,
    UnsupportedError,
    fused_moe,
    prepare_experts,
)
from b12x_core.reference.quantize import as_activation
from conftest import Stored, activation_dtype, input_scale_for, stored_weight

BF16 = Scheme.parse("bf16")
ACTIVATIONS = {
    "silu": SILU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "relu2": RELU2,
    "silu_not_gated": SILU_NOT_GATED,
    "gelu_not_gated": GELU_NOT_GATED,
    "gelu_tanh_not_gated": GELU_TANH_NOT_GATED,
    "relu2_not_gated": RELU2_NOT_GATED,
    "silu_limit": Activation("silu", limit=1.0),
    "swiglu_gpt_oss": SwiGLU(alpha=1.702, beta=1.0, limit=7.0),
    "swiglu_tight": SwiGLU(alpha=1.3, beta=0.5, limit=0.5),
}


def scalar(activation: Activation, gate: float, up: float) -> float:
    """The definitions once more, on Python floats."""
    if activation.limit is not None:
        gate, up = min(gate, activation.limit), max(-activation.limit, min(up, activation.limit))
    sigmoid = 1 / (1 + math.exp(-activation.alpha * gate))
    value = {
        "silu": gate * sigmoid,
        "swiglu": gate * sigmoid,
        "gelu": 0.5 * gate * (1 + math.erf(gate / math.sqrt(2))),
        "gelu_tanh": 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
        "relu2": max(gate, 0.0) ** 2,
    }[activation.function]
    return value * (up + activation.beta) if activation.gated else value


def stack(tensors: list[torch.Tensor | None], flat: bool = False) -> torch.Tensor | None:
    """Stack what every expert has; `flat` for one value an expert. torch cannot stack 8-bit floats: bytes are."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    if flat:
        return torch.cat(present)
    return torch.stack([t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in present]).view(present[0].dtype)


def stored_rows(scheme: Scheme, w: torch.Tensor, parts: int) -> Stored:
    """`stored_weight` of equal runs of rows, each with blocks of its own."""
    data, scale, global_scale, dense = zip(*(stored_weight(scheme, part) for part in w.chunk(parts)), strict=True)
    if parts == 1:
        return data[0], scale[0], global_scale[0], dense[0]
    return torch.cat(data), torch.cat(scale), None, torch.cat(dense)


def make_experts(
    scheme: Scheme, experts: int, hidden: int, intermediate: int, activation: Activation, *, interleaved: bool = False
) -> tuple[ExpertWeights, torch.Tensor, torch.Tensor]:
    """Random experts with bias, and the float32 weights that they stand for."""
    static = input_scale_for(scheme, torch.full((1,), 8.0))
    weight, scale, dense, rest = {}, {}, {}, {}
    for name, rows, k in (("w13", activation.rows * intermediate, hidden), ("w2", hidden, intermediate)):
        # The blocks of fp8-block start anew at the up rows: quantized apart, then put one over the other.
        apart = scheme.weight == FP8_BLOCK and name == "w13" and activation.gated and not interleaved
        parts = [stored_rows(scheme, torch.randn(rows, k) * 0.2, 2 if apart else 1) for _ in range(experts)]
        weight[name] = stack([data for data, *_ in parts])
        scale[name] = stack([value for _, value, *_ in parts], flat=scheme.weight == FP8_TENSOR)
        dense[name] = torch.stack([part[3] for part in parts])
        rest[f"{name}_global_scale"] = stack([value for *_, value, _ in parts], flat=True)
        rest[f"{name}_input_scale"] = None if static is None else static.expand(experts)
        rest[f"{name}_bias"] = torch.randn(experts, rows)
    prepared = prepare_experts(
        scheme,
        weight["w13"],
        scale["w13"],
        weight["w2"],
        scale["w2"],
        gate_up="interleaved" if interleaved else "halves",
        **rest,
    )
    return prepared, dense["w13"], dense["w2"]


def expected_moe(
    x: torch.Tensor,
    experts: ExpertWeights,
    dense: tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    activation: Activation,
    *,
    on_input: bool = False,
    scaling: float = 1.0,
) -> torch.Tensor:
    """One route at a time, in float64; ids are local, -1 for none."""
    scheme, act = experts.scheme, experts.scheme.activation
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1]) if ids[t, s] >= 0):
        e, weight = int(ids[token, slot]), topk_weights[token, slot].double()
        row = x[token : token + 1]
        row = (row.float() * weight).to(x.dtype) if on_input else row
        static13 = None if experts.w13_input_scale is None else experts.w13_input_scale[e]
        static2 = None if experts.w2_input_scale is None else experts.w2_input_scale[e]
        assert scheme.activation != FP8_TENSOR, "spans rows: not this loop"
        h = as_activation(row, act, static13).double() @ dense[0][e].double().T
        h = (h + experts.w13_bias[e].double())[0]
        if not activation.gated:
            gate, up = h, torch.ones_like(h)
        else:
            gate, up = (h[0::2], h[1::2]) if experts.interleaved else h.chunk(2)
        values = [scalar(activation, g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
        seen = as_activation(torch.tensor([values]), act, static2).double()
        out = (seen @ dense[1][e].double().T)[0] + experts.w2_bias[e].double()
        y[token] += out if on_input else out * weight
    return y * scaling


def routing(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(max(experts, top_k))[:top_k] % experts for _ in range(tokens)])
    return torch.rand(tokens, top_k), ids.reshape(tokens, top_k)


def assert_close(y: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2e-3 * expected.abs().max().item())


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.activation != FP8_TENSOR])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_every_scheme(name: str, interleaved: bool) -> None:
    scheme = SCHEMES[name]
    experts, *dense = make_experts(scheme, 4, 64, 96, SILU, interleaved=interleaved)
    x = torch.randn(5, 64).to(activation_dtype(scheme))
    weights, ids = routing(5, 4, 2)
    y = fused_moe(x, experts, weights, ids)
    expected = expected_moe(x, experts, (dense[0], dense[1]), weights, ids, SILU)
    if scheme.activation.quantized:
        # A rounding of the intermediate may fall to the other side: bound the norm of the difference instead.
        assert (y.double() - expected).norm() <= 0.02 * expected.norm()
    else:
        assert_close(y, expected)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel-tensor"])
def test_dynamic_tensor_scale_spans_all_routes(name: str) -> None:
    scheme = SCHEMES[name]
    experts, w13, w2 = make_experts(scheme, 3, 64, 32, SILU)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    weights, ids = routing(4, 3, 2)
    seen = as_activation(x, scheme.activation).double()
    routes = [(t, int(e), w) for t in range(4) for e, w in zip(ids[t], weights[t].double(), strict=True)]
    assert experts.w13_bias is not None
    assert experts.w2_bias is not None
    h = torch.stack([seen[t] @ w13[e].double().T + experts.w13_bias[e] for t, e, _ in routes])
    gate, up = h.chunk(2, 1)
    second = as_activation((torch.nn.functional.silu(gate) * up).float(), scheme.activation).double()
    expected = torch.zeros(4, 64, dtype=torch.float64)
    for (t, e, w), row in zip(routes, second, strict=True):
        expected[t] += w * (row @ w2[e].double().T + experts.w2_bias[e])
    y = fused_moe(x, experts, weights, ids)
    assert (y.double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_every_activation(name: str, interleaved: bool) -> None:
    activation = ACTIVATIONS[name]
    if interleaved and not activation.gated:
        with pytest.raises(ArgumentError, match="gate_up must be 'halves'"):
            make_experts(BF16, 4, 32, 48, activation, interleaved=True)
        return
    experts, *dense = make_experts(BF16, 4, 32, 48, activation, interleaved=interleaved)
    x = torch.randn(6, 32, dtype=torch.bfloat16) * 3
    weights, ids = routing(6, 4, 3)
    y = fused_moe(x, experts, weights, ids, activation=activation)
    assert_close(y, expected_moe(x, experts, (dense[0], dense[1]), weights, ids, activation))


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("top_k", [1, 8, 22])
def test_few_tokens_top_k_and_routed_scaling(tokens: int, top_k: int) -> None:
    experts, *dense = make_experts(BF16, 24, 32, 16, SILU)
    x = torch.randn(tokens, 32, dtype=torch.bfloat16)
    weights, ids = routing(tokens, 24, top_k)
    y = fused_moe(x, experts, weights, ids, routed_scaling=2.5)
    assert_close(y, expected_moe(x, experts, (dense[0], dense[1]), weights, ids, SILU, scaling=2.5))


@pytest.mark.parametrize("on_input", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sentinels_duplicates_and_where_the_weight_goes(on_input: bool, dtype: torch.dtype) -> None:
    experts, *dense = make_experts(BF16, 4, 32, 16, SILU)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    ids = torch.tensor([[0, -1], [2, 2], [-1, -1], [3, 1]])
    weights = torch.rand(4, 2)
    y = fused_moe(x, experts, weights, ids.to(dtype), router_weight_on_input=on_input)
    assert_close(y, expected_moe(x, experts, (dense[0], dense[1]), weights, ids, SILU, on_input=on_input))
    assert not y[2].any()


def test_expert_map_takes_global_ids() -> None:
    experts, *dense = make_experts(BF16, 3, 32, 16, SILU)
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[[4, 9, 2]] = torch.tensor([0, 1, 2], dtype=torch.int32)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    ids = torch.tensor([[4, 0, 11], [9, 2, -1], [1, 3, 5]], dtype=torch.int32)
    weights = torch.rand(3, 3)
    y = fused_moe(x, experts, weights, ids, expert_map=expert_map)
    local = torch.tensor([[0, -1, -1], [1, 2, -1], [-1, -1, -1]])
    assert_close(y, expected_moe(x, experts, (dense[0], dense[1]), weights, local, SILU))
    assert not y[2].any()


def test_experts_that_nobody_chose_are_not_read() -> None:
    experts, *_ = make_experts(BF16, 4, 32, 16, SILU)
    experts.w13[3].fill_(torch.nan)
    experts.w2[3].fill_(torch.nan)
    y = fused_moe(torch.randn(2, 32, dtype=torch.bfloat16), experts, torch.rand(2, 2), torch.tensor([[0, 1], [1, 2]]))
    assert y.isfinite().all()


def test_no_tokens_and_out() -> None:
    experts, *_ = make_experts(Scheme.parse("nvfp4-w4a4"), 4, 32, 16, SILU)
    empty = fused_moe(
        torch.empty(0, 32, dtype=torch.bfloat16), experts, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32)
    )
    assert empty.shape == (0, 32)
    x, out = torch.randn(2, 32, dtype=torch.bfloat16), torch.full((2, 32), torch.nan, dtype=torch.bfloat16)
    weights, ids = routing(2, 4, 2)
    assert fused_moe(x, experts, weights, ids, out=out) is out
    assert torch.equal(out, fused_moe(x, experts, weights, ids))


def test_global_scale_a_row_serves_unequal_gate_and_up_exactly() -> None:
    scheme = Scheme.parse("nvfp4-w4a16")
    experts, *_ = make_experts(scheme, 2, 32, 16, SILU)
    assert experts.w13_global_scale is not None
    rows = experts.w13_global_scale.unsqueeze(1).repeat(1, 32)
    rows[:, 16:] *= 3
    assert experts.w13_bias is not None
    experts.w13_bias.zero_()
    per_row = prepare_experts(
        scheme,
        experts.w13,
        experts.w13_scale,
        experts.w2,
        experts.w2_scale,
        w13_global_scale=rows,
        w2_global_scale=experts.w2_global_scale,
    )
    single = prepare_experts(
        scheme,
        experts.w13,
        experts.w13_scale,
        experts.w2,
        experts.w2_scale,
        w13_global_scale=experts.w13_global_scale,
        w2_global_scale=experts.w2_global_scale,
    )
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    weights, ids = routing(3, 2, 1)
    torch.testing.assert_close(
        fused_moe(x, per_row, weights, ids).float(),
        fused_moe(x, single, weights, ids).float() * 3,
        rtol=2**-7,
        atol=1e-6,
    )


def test_block_scales_start_anew_at_the_up_projection() -> None:
    """I = 160 is no multiple of 128: gate and up each have two rows of blocks, the second of 32 rows."""
    scheme = Scheme.parse("fp8-block-w8a16")
    w13, w2 = torch.ones(1, 320, 64).to(torch.float8_e4m3fn), torch.eye(160)[None, :64].to(torch.float8_e4m3fn)
    scale = torch.tensor([[[1.0], [2.0], [3.0], [5.0]]])
    experts = prepare_experts(scheme, w13, scale, w2, torch.ones(1, 1, 2))
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    one = torch.ones(1, 1)
    y = fused_moe(x, experts, one, one.int() - 1, activation=RELU2)
    assert y[0].tolist() == [3.0] * 64  # gate 1, up 3
    last = prepare_experts(scheme, w13, scale, torch.eye(160)[None, 96:].to(torch.float8_e4m3fn), torch.ones(1, 1, 2))
    y = fused_moe(x, last, one, one.int() - 1, activation=RELU2)
    assert y[0].tolist() == [3.0] * 32 + [20.0] * 32  # from row 128 on: gate 2, up 5
    with pytest.raises(ArgumentError, match=r"w13_scale must be .* with shape \(1, 4, 1\) for fp8-block weights"):
        prepare_experts(scheme, w13, scale[:, :3], w2, torch.ones(1, 1, 2))


def test_reload_keeps_addresses() -> None:
    scheme = Scheme.parse("mxfp4-w4a16")
    first, *_ = make_experts(scheme, 2, 32, 32, SILU)
    second, *_ = make_experts(scheme, 2, 32, 32, SILU)
    address = first.w13.data_ptr()
    again = prepare_experts(
        scheme,
        second.w13,
        second.w13_scale,
        second.w2,
        second.w2_scale,
        w13_bias=second.w13_bias,
        w2_bias=second.w2_bias,
        into=first,
    )
    assert again is first
    assert first.w13.data_ptr() == address
    assert torch.equal(first.w13, second.w13)


def test_bad_input_gets_a_sentence() -> None:
    experts, *_ = make_experts(BF16, 4, 32, 16, SILU)
    x, weights, ids = torch.randn(2, 32, dtype=torch.bfloat16), torch.rand(2, 2), torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ArgumentError, match=r"topk_ids must be from -1 \(none\) to 3 \(local experts\); got \(0, 4\)"):
        fused_moe(x, experts, weights, torch.tensor([[0, 1], [1, 4]]))
    with pytest.raises(
        ArgumentError, match=r"topk_weights must be .* shape \(2, 2\) = \(M, top_k\); got float32 \(2, 3\)"
    ):
        fused_moe(x, experts, torch.rand(2, 3), ids)
    with pytest.raises(ArgumentError, match=r"x must be .* \(\*, 32\) = \(M, H\); got bfloat16 \(2, 31\)"):
        fused_moe(x[:, :31], experts, weights, ids)
    with pytest.raises(ArgumentError, match=r"activation must be gated like the experts"):
        fused_moe(x, experts, weights, ids, activation=RELU2_NOT_GATED)
    with pytest.raises(ArgumentError, match=r"w13 must be of shape \(4, 32 or 16, 32\) to fit w2"):
        prepare_experts(BF16, experts.w13[:, :31], None, experts.w2, None)
    with pytest.raises(UnsupportedError, match=r"mxfp4-w4a16 needs the intermediate size to be a multiple of 32"):
        prepare_experts(
            Scheme.parse("mxfp4-w4a16"),
            torch.zeros(2, 32, 16, dtype=torch.uint8),
            torch.zeros(2, 32, 1, dtype=torch.uint8),
            torch.zeros(2, 32, 8, dtype=torch.uint8),
            torch.zeros(2, 32, 1, dtype=torch.uint8),
        )
