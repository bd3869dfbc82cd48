"""The oracle against values worked out by hand, so that it may judge others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from b12x_conformance.oracle import (
    ACTIVATION_RULES,
    WEIGHT_FORMATS,
    Quantized,
    attention,
    codecs,
    dequantize,
    fake_quantize_activation,
    linear,
    moe,
    quantize_weight,
)
from b12x_core.activations import GELU, GELU_TANH, RELU2_NOT_GATED, SILU, SILU_NOT_GATED, Activation, SwiGLU
from b12x_core.formats import SCHEMES
from b12x_core.testing import bounds

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


# Codes


def test_e2m1_codes() -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert codecs.decode(codes, codecs.E2M1).tolist() == E2M1_VALUES + [-v for v in E2M1_VALUES]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.26, 0.5), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.01, 6), (7, 6), (1e9, 6)],
)
def test_e2m1_rounds_to_nearest_even_and_saturates(value: float, rounded: float) -> None:
    assert codecs.round_to([value, -value], codecs.E2M1).tolist() == [rounded, -rounded]


def test_e4m3_codes_by_their_definition() -> None:
    codes = np.arange(256, dtype=np.uint8)
    decoded = codecs.decode(codes, codecs.E4M3)
    for code, value in zip(codes.tolist(), decoded.tolist(), strict=True):
        exponent, mantissa = code >> 3 & 15, code & 7
        if (exponent, mantissa) == (15, 7):
            assert math.isnan(value)
            continue
        magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        assert value == (-magnitude if code & 128 else magnitude)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(17, 16), (19, 20), (448, 448), (464, 448), (1e30, 448), (math.inf, 448), (2**-9, 2**-9), (2**-10, 0),
     (3 * 2**-10, 2**-8), (2**-10 + 2**-20, 2**-9)],
)  # fmt: skip
def test_e4m3_rounds_to_nearest_even_and_saturates(value: float, rounded: float) -> None:
    assert codecs.round_to([value, -value], codecs.E4M3).tolist() == [rounded, -rounded]


def test_e5m2_largest() -> None:
    assert codecs.round_to([57344.0, 1e30, 1.125], codecs.E5M2).tolist() == [57344.0, 57344.0, 1.0]


@pytest.mark.parametrize(
    ("value", "code"),
    [(1.0, 127), (1.0 + 2**-23, 128), (2.0, 128), (0.75, 127), (0.5, 126), (0.0, 0), (2.0**-127, 0), (1e-45, 0),
     (2.0**127, 254), (2.0**128, 254)],
)  # fmt: skip
def test_e8m0_rounds_up(value: float, code: int) -> None:
    assert codecs.e8m0_codes_above(value).item() == code


def test_e8m0_values() -> None:
    assert codecs.e8m0_values(np.array([0, 126, 127, 128, 254], dtype=np.uint8)).tolist() == [
        2.0**-127, 0.5, 1.0, 2.0, 2.0**127,
    ]  # fmt: skip


def test_low_nibble_is_even_k() -> None:
    packed = codecs.pack_e2m1(np.array([[1, 2, 15, 0]], dtype=np.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert codecs.unpack_e2m1(packed).tolist() == [[1, 2, 15, 0]]


# Activation rules


def row(*values: float, k: int) -> torch.Tensor:
    """One row that starts with some values and goes on with zeros."""
    return torch.tensor([[*values, *[0.0] * (k - len(values))]])


@pytest.mark.parametrize(
    ("values", "input_scale", "read_back"),
    [
        ((6, 5, 2.5, -1.25), 1.0, (6, 4, 2, -1)),  # scale 6 / 6 = 1
        ((6, 5, 2.5, -1.25), 0.5, (6, 4, 2, -1)),  # scale 2, times 0.5
        ((7, 1), 1.0, (6.75, 1.125)),  # scale 7 / 6 becomes 1.125: 6.2 saturates at 6, 0.89 becomes 1
        ((6000, 1500), 1.0, (6 * 448, 3 * 448)),  # scale 1000 saturates at 448: 13.4 at 6, 3.35 becomes 3
        ((2.0**-12,), 1.0, (0,)),  # scale 2 ** -12 / 6 is below half of the smallest e4m3: 0
    ],
)
def test_nvfp4(values: tuple[float, ...], input_scale: float, read_back: tuple[float, ...]) -> None:
    x = row(*values, k=16)
    assert torch.equal(fake_quantize_activation(x, "nvfp4", input_scale), row(*read_back, k=16))


def test_nvfp4_blocks_are_16_wide() -> None:
    x = torch.cat([row(600.0, k=16), row(0.5, k=16)], dim=1)
    read = fake_quantize_activation(x, "nvfp4", 1.0)
    # The second block: scale e4m3(0.5 / 6) = 0.0859375 = 11 / 128, element 5.8 becomes 6.
    assert read[0, 16].item() == 6 * 11 / 128


@pytest.mark.parametrize(
    ("rule", "value", "read_back"),
    [
        ("mxfp4", (6.0, 5.0), (6.0, 4.0)),  # scale 1
        ("mxfp4", (7.0, 2.5), (8.0, 2.0)),  # 7 / 6 up to 2: 3.5 becomes 4, 1.25 becomes 1
        ("mxfp4", (3.5, 0.1), (4.0, 0.0)),  # 3.5 / 6 up to 1: 3.5 becomes 4
        ("mxfp8", (448.0, 17.0), (448.0, 16.0)),  # scale 1
        ("mxfp8", (449.0, 17.0), (448.0, 16.0)),  # scale 2: 224.5 becomes 224, 8.5 becomes 8
        ("fp8-token", (448.0, 17.0), (448.0, 16.0)),
        ("fp8-group", (896.0, 34.0), (896.0, 32.0)),
        ("fp8-tensor", (896.0, 34.0), (896.0, 32.0)),
    ],
)
def test_dynamic_rules(rule: str, value: tuple[float, float], read_back: tuple[float, float]) -> None:
    assert torch.equal(fake_quantize_activation(row(*value, k=32), rule), row(*read_back, k=32))


def test_what_shares_a_scale() -> None:
    x = torch.zeros(2, 160)
    x[0, 0], x[0, 40], x[0, 150], x[1, 150] = 448 * 2.0**20, 17.0, 17.0, 17.0
    read = {rule: fake_quantize_activation(x, rule) for rule in ("fp8-tensor", "fp8-token", "fp8-group", "mxfp8")}
    near = {rule: (y[0, 40].item(), y[0, 150].item(), y[1, 150].item()) for rule, y in read.items()}
    alone = pytest.approx(17.0)
    # With a scale of 2 ** 20, 17 underflows.
    assert near["fp8-tensor"] == (0.0, 0.0, 0.0)
    assert near["fp8-token"] == (0.0, 0.0, alone)
    assert near["fp8-group"] == (0.0, alone, alone)
    # 17 / 448 up to 1 / 16: 272 lies halfway between 256 and 288 and becomes the even 256.
    assert near["mxfp8"] == (16.0, 16.0, 16.0)


def test_static_fp8_saturates() -> None:
    read = fake_quantize_activation(row(1000.0, -17.0, k=4), "fp8-tensor", 2.0)
    assert torch.equal(read, row(896.0, -16.0, k=4))


@pytest.mark.parametrize("rule", ACTIVATION_RULES)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38])
def test_zeros_and_tiny_scales_give_no_nan(rule: str, scale: float) -> None:
    static = scale if rule in ("nvfp4", "fp8-tensor") else None
    assert torch.equal(fake_quantize_activation(torch.zeros(2, 64), rule, static), torch.zeros(2, 64))
    x = torch.full((2, 64), 3.0)
    x[1] = 1e-45
    assert fake_quantize_activation(x, rule, static).isfinite().all()
    if static == 0:
        assert torch.equal(fake_quantize_activation(x, rule, static), torch.zeros(2, 64))


def test_rules_refuse_what_they_do_not_take() -> None:
    x = torch.zeros(1, 32)
    with pytest.raises(ValueError, match="needs an input scale"):
        fake_quantize_activation(x, "nvfp4")
    with pytest.raises(ValueError, match="has no input scale"):
        fake_quantize_activation(x, "mxfp8", 1.0)
    with pytest.raises(ValueError, match="must be a multiple of 32"):
        fake_quantize_activation(torch.zeros(1, 48), "mxfp4")
    with pytest.raises(ValueError, match="rule must be one of"):
        fake_quantize_activation(x, "int4")


# Weights


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_weight_of_representable_values_is_kept(format: str) -> None:
    w = torch.tensor(E2M1_VALUES[::-1]).repeat(2, 130, 4)  # (2, 130, 32): every row, block and matrix reaches 6
    global_scale = torch.tensor(0.5) if format == "nvfp4" else None
    read = dequantize(quantize_weight(w, format, global_scale=global_scale))
    if format in ("nvfp4", "mxfp4"):
        assert torch.equal(read, w)
    else:
        # 6 / 448 is no power of two: each value is off by at most half a step of e4m3.
        assert (read - w).abs().max() <= w.max() / 448 * 16


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_shapes_and_dtypes_of_a_checkpoint(format: str) -> None:
    q = quantize_weight(torch.randn(3, 130, 288), format)
    data, scale, shape = {
        "fp8-tensor": (torch.float8_e4m3fn, torch.float32, (3,)),
        "fp8-channel": (torch.float8_e4m3fn, torch.float32, (3, 130, 1)),
        "fp8-block": (torch.float8_e4m3fn, torch.float32, (3, 2, 3)),
        "mxfp8": (torch.float8_e4m3fn, torch.uint8, (3, 130, 9)),
        "mxfp4": (torch.uint8, torch.uint8, (3, 130, 9)),
        "nvfp4": (torch.uint8, torch.float8_e4m3fn, (3, 130, 18)),
    }[format]
    packed = 2 if data == torch.uint8 else 1
    assert (q.data.dtype, tuple(q.data.shape)) == (data, (3, 130, 288 // packed))
    assert (q.scale.dtype, tuple(q.scale.shape)) == (scale, shape)
    assert (q.global_scale is None) == (format != "nvfp4")


def test_blocks_at_the_edge_are_smaller() -> None:
    w = torch.full((130, 130), 100.0)
    w[128:], w[:, 128:], w[128:, 128:] = 2.0, 3.0, 4.0
    q = quantize_weight(w, "fp8-block")
    assert torch.allclose(q.scale * 448, torch.tensor([[100.0, 3.0], [2.0, 4.0]]))
    assert torch.allclose(dequantize(q), w)


def test_e8m0_scales_of_blocks_are_powers_of_two() -> None:
    q = quantize_weight(torch.randn(200, 200), "fp8-block", scale_e8m0=True)
    assert torch.equal(q.scale.to(torch.float8_e8m0fnu).float(), q.scale)
    as_stored = Quantized("fp8-block", q.data, q.scale.to(torch.float8_e8m0fnu))
    assert torch.equal(dequantize(as_stored), dequantize(q))


def test_global_scale_of_each_row() -> None:
    data = torch.full((2, 8), 0x72, dtype=torch.uint8)  # even k: 1, odd k: 6
    scale = torch.tensor([[2.0], [0.5]]).to(torch.float8_e4m3fn)
    read = dequantize(Quantized("nvfp4", data, scale, torch.tensor([10.0, 100.0])))
    assert torch.equal(read, torch.tensor([[20.0, 120.0] * 8, [50.0, 300.0] * 8]))


# Layers


def test_every_scheme_has_a_rule() -> None:
    of_format = {"bf16": "none", "fp16": "none", "fp8-row": "fp8-token"}
    for name, scheme in SCHEMES.items():
        expected = of_format.get(scheme.activation.name, scheme.activation.name)
        assert linear.ACTIVATION_RULE[name] == expected
    assert set(linear.ACTIVATION_RULE) == set(SCHEMES)


def test_linear_of_shards() -> None:
    x = torch.tensor([[1.0, 2.0]])
    y = linear.linear(
        x, [torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0]])], "none", bias=torch.tensor([0.5, -0.5])
    )
    assert torch.equal(y, torch.tensor([[11.5, 16.5]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("activation", "gate", "up", "expected"),
    [
        (SILU, 1.0, 2.0, 2 * 0.7310585786300049),
        (GELU, 1.0, 2.0, 2 * 0.8413447460685429),
        (GELU_TANH, 1.0, 2.0, 2 * 0.8411919906082768),
        (RELU2_NOT_GATED, None, 3.0, 9.0),
        (RELU2_NOT_GATED, None, -3.0, 0.0),
        (SILU_NOT_GATED, None, -1.0, -0.2689414213699951),
        (SwiGLU(), 1.0, 2.0, 2 * 0.7310585786300049),
        (SwiGLU(1.702, 1.0, 7.0), 20.0, 20.0, 7 / (1 + math.exp(-1.702 * 7)) * 8),
        (SwiGLU(1.702, 1.0, 7.0), -20.0, -20.0, -20 / (1 + math.exp(1.702 * 20)) * -6),
        (Activation("silu", limit=10.0), 20.0, -20.0, 10 / (1 + math.exp(-10)) * -10),
    ],
)
def test_activations(activation: Activation, gate: float | None, up: float, expected: float) -> None:
    g = None if gate is None else torch.tensor([gate], dtype=torch.float64)
    h = moe.activate(g, torch.tensor([up], dtype=torch.float64), activation)
    assert h.item() == pytest.approx(expected, rel=1e-12)


def scalar_expert(up: float, down: float, bias: float = 0.0) -> moe.Expert:
    """An expert of one channel: relu2(up * x) * down + bias."""
    return moe.Expert(None, torch.tensor([[up]]), torch.tensor([[down]]), down_bias=torch.tensor([bias]))


EXPERTS = [scalar_expert(1.0, 1.0), scalar_expert(2.0, 10.0, bias=3.0), scalar_expert(3.0, 100.0)]


@pytest.mark.parametrize(
    ("ids", "options", "expected"),
    [
        ([0, 1], {}, 0.5 * 4 + 0.25 * (16 * 10 + 3)),
        ([2, -1], {}, 0.5 * 36 * 100),
        ([-1, -1], {}, 0.0),
        ([2, 1], {"local": range(1, 2)}, 0.25 * 163),
        ([1, 1], {}, 0.75 * 163),
        ([1, -1], {"router_weight_on_input": True}, (2.0 * 0.5 * 2) ** 2 * 10 + 3),
    ],
)
def test_routes(ids: list[int], options: dict[str, object], expected: float) -> None:
    y = moe.moe(
        torch.tensor([[2.0]]),
        torch.tensor([[0.5, 0.25]]),
        torch.tensor([ids]),
        EXPERTS,
        RELU2_NOT_GATED,
        "none",
        **options,  # type: ignore[arg-type]
    )
    assert y.item() == expected


def test_the_intermediate_is_quantized_again() -> None:
    w = torch.zeros(32, 32)
    w[0, 0] = 1.0
    expert = moe.Expert(None, w, w)
    x = row(3.0, k=32)
    y = moe.moe(x, torch.ones(1, 1), torch.zeros(1, 1).long(), [expert], RELU2_NOT_GATED, "mxfp4")
    # 3 -> scale 1, 3 -> 9 -> 9 / 6 up to 2, 4.5 becomes 4 -> 8.
    assert y[0, 0].item() == 8.0


def test_a_dynamic_scale_of_the_whole_spans_all_routes() -> None:
    experts = [scalar_expert(1.0, 1.0), scalar_expert(8.0, 0.0)]
    x = torch.tensor([[17.0 / 16]])
    y = moe.moe(x, torch.ones(1, 2), torch.tensor([[0, 1]]), experts, RELU2_NOT_GATED, "fp8-tensor")
    # Intermediates h and 64 h share the scale 64 h / 448 = h / 7: expert 0 is read as 7 of them, exactly h.
    h = float(fake_quantize_activation(x, "fp8-tensor")) ** 2
    assert y.item() == pytest.approx(h, rel=1e-6)
    x2 = torch.tensor([[1.0]])
    experts = [scalar_expert(1.0, 1.0), scalar_expert(math.sqrt(448 / 17), 0.0)]
    y = moe.moe(x2, torch.ones(1, 2), torch.tensor([[0, 1]]), experts, RELU2_NOT_GATED, "fp8-tensor")
    # Intermediates 1 and 448 / 17: 1 is 17 steps of the shared scale, a tie that becomes 16.
    assert y.item() == pytest.approx(16 / 17, rel=1e-6)


def attend(q: list[float], k: list[float], v: list[float], queries: int, **options: object) -> attention.Attended:
    """Attention of one request with heads of one channel and a softmax scale of 1."""
    shape = (-1, 1, 1)
    return attention.attention(
        torch.tensor(q).reshape(shape),
        [torch.tensor(k).reshape(shape)],
        [torch.tensor(v).reshape(shape)],
        [queries],
        **{"scale": 1.0, **options},  # type: ignore[arg-type]
    )


def test_attention_of_one_and_two_keys() -> None:
    assert attend([1.0], [5.0], [7.0], 1).out.item() == 7.0
    both = attend([1.0], [0.0, math.log(3)], [4.0, 8.0], 1)
    assert both.out.item() == pytest.approx(0.25 * 4 + 0.75 * 8)
    assert both.lse.item() == pytest.approx(math.log(4))


def test_attention_is_causal() -> None:
    out = attend([0.0] * 3, [0.0] * 3, [3.0, 6.0, 9.0], 3).out.flatten()
    assert out.tolist() == pytest.approx([3.0, 4.5, 6.0])


def test_a_window_counts_the_own_key() -> None:
    out = attend([0.0] * 3, [0.0] * 3, [3.0, 6.0, 9.0], 3, window=2).out.flatten()
    assert out.tolist() == pytest.approx([3.0, 4.5, 7.5])
    assert attend([0.0], [0.0] * 3, [3.0, 6.0, 9.0], 1, window=1).out.item() == pytest.approx(9.0)


def test_a_sink_takes_its_share() -> None:
    result = attend([0.0], [0.0], [6.0], 1, sinks=torch.tensor([math.log(2)]))
    assert result.out.item() == pytest.approx(2.0)
    assert result.lse.item() == pytest.approx(math.log(3))


def test_soft_cap_and_scale() -> None:
    capped = attend([2.0], [0.0, 3.0], [0.0, 1.0], 1, scale=0.5, soft_cap=2.0).out.item()
    score = 2 * math.tanh(3 * 2 * 0.5 / 2)
    assert capped == pytest.approx(1 / (1 + math.exp(-score)))


def test_default_scale_and_groups() -> None:
    q = torch.tensor([[[1.0, 0, 0, 0], [0, 1.0, 0, 0], [1.0, 0, 0, 0], [0, 1.0, 0, 0]]])
    k = torch.zeros(2, 2, 4)
    k[1, 0, 0] = 2 * math.log(3)  # seen by head 0, of the first group, only
    k[1, 1, 1] = 2 * math.log(9)  # seen by head 3, of the second group, only
    v = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 2, 1)
    out = attention.attention(q, [k], [v], [1]).out.flatten()
    assert out.tolist() == pytest.approx([0.75, 0.5, 0.5, 0.9])


def test_rows_without_keys() -> None:
    q = torch.ones(5, 1, 1)
    one, none = torch.ones(1, 1, 1), torch.ones(0, 1, 1)
    result = attention.attention(q, [none, one], [none, one * 2], [2, 1])
    assert result.out.flatten().tolist() == [0, 0, 2, 0, 0]
    assert result.lse.flatten().tolist() == [-math.inf, -math.inf, 1.0, -math.inf, -math.inf]


def test_stored_fp8_keys() -> None:
    values = torch.tensor([[[4.25, 1000.0]]])
    assert attention.stored(values, "auto", 1.0).flatten().tolist() == [4.25, 1000.0]
    assert attention.stored(values, "fp8_e4m3", 0.25).flatten().tolist() == [4.0, 112.0]


# The metric


def test_error() -> None:
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    rms = math.sqrt(12.5)
    assert bounds.error(torch.tensor([[3.0, 4.5]]), expected) == pytest.approx(0.5 / (4 + rms))
    assert bounds.error(torch.tensor([[3.0, 4.0]]), expected) == 0
    assert bounds.error(torch.tensor([[math.nan, 4.0]]), expected) == math.inf
    assert bounds.error(torch.tensor([3.0, 4.0]), expected) == math.inf
    assert bounds.error(torch.tensor([[1e-30]]), torch.zeros(1, 1)) == math.inf
    assert bounds.error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0


def test_one_row_does_not_hide_behind_another() -> None:
    expected = torch.tensor([[1e6, 1e6], [1.0, 1.0]], dtype=torch.float64)
    assert bounds.error(torch.tensor([[1e6, 1e6], [1.0, 2.0]]), expected) == pytest.approx(0.5)
