"""Linear layers in every scheme."""

from __future__ import annotations

import pytest
import torch
from b12x_core import FP8_BLOCK, FP8_GROUP, SCHEMES, ArgumentError, Scheme, UnsupportedError, linear, prepare_linear
from b12x_core.ops.linear import in_tiles
from b12x_core.reference.quantize import as_activation
from conftest import activation_dtype, input_scale_for, make_linear, stored_weight, supports_linear_on_tiles


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 160, 576), (17, 72, 160), (0, 16, 32)])
def test_matches_dequantized_product(name: str, m: int, n: int, k: int) -> None:
    scheme = SCHEMES[name]
    x = torch.randn(m, k).to(activation_dtype(scheme))
    weights, dense = make_linear(scheme, n, k, torch.randn(4, k) if m == 0 else x)
    y = linear(x, weights)
    seen = as_activation(x, scheme.activation, weights.input_scale).double()
    assert weights.bias is not None
    expected = seen @ dense.double().T + weights.bias.double()
    assert y.shape == (m, n)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.weight.quantized])
def test_one_hot_rows_read_back_the_weight_exactly(name: str) -> None:
    """A one-hot activation is exact in every format, so a column of the weight comes back up to x's own rounding."""
    scheme = SCHEMES[name]
    k = 160
    x = torch.eye(k, dtype=torch.bfloat16)
    data, scale, global_scale, dense = stored_weight(scheme, torch.randn(48, k))
    one = torch.tensor([1 / 6]) if scheme.static_activation_scale else None
    weights = prepare_linear(scheme, data, scale, global_scale=global_scale, input_scale=one)
    seen = as_activation(x, scheme.activation, one).diagonal()
    expected = (dense * seen).T.bfloat16()
    assert torch.equal(linear(x, weights), expected)


def test_leading_dimensions_and_float16() -> None:
    scheme = Scheme.parse("mxfp4-w4a16")
    x = torch.randn(2, 3, 64, dtype=torch.float16)
    weights, _ = make_linear(scheme, 24, 64, x)
    y = linear(x, weights)
    assert y.shape == (2, 3, 24)
    assert y.dtype == torch.float16
    assert torch.equal(y[1, 2], linear(x[1, 2], weights))


def test_global_scale_a_row_serves_fused_shards_exactly() -> None:
    scheme = Scheme.parse("nvfp4-w4a16")
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    shards = [stored_weight(scheme, torch.randn(16, 64) * size) for size in (1.0, 1e-3, 50.0)]
    separate = [linear(x, prepare_linear(scheme, data, scale, global_scale=g)) for data, scale, g, _ in shards]
    rows = torch.cat([g.expand(16) for _, _, g, _ in shards if g is not None])
    fused = prepare_linear(
        scheme,
        torch.cat([data for data, *_ in shards]),
        torch.cat([scale.view(torch.uint8) for _, scale, *_ in shards if scale is not None]).view(torch.float8_e4m3fn),
        global_scale=rows,
    )
    assert torch.equal(linear(x, fused), torch.cat(separate, dim=1))


def test_fp8_block_takes_e8m0_scales() -> None:
    scheme = Scheme.parse("fp8-block")
    data = torch.randn(192, 320).to(torch.float8_e4m3fn)
    codes = torch.randint(120, 130, (2, 3), dtype=torch.uint8)
    x = torch.randn(4, 320, dtype=torch.bfloat16)
    powers = torch.exp2(codes.float() - 127)
    assert torch.equal(linear(x, prepare_linear(scheme, data, codes)), linear(x, prepare_linear(scheme, data, powers)))


def test_each_block_of_edges_has_its_own_scale() -> None:
    """The scale of a block equals its index: rows and columns of a wrong block show."""
    n, k = 192, 320
    data = torch.ones(n, k).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0).reshape(2, 3)
    y = linear(torch.eye(k, dtype=torch.bfloat16), prepare_linear(Scheme(FP8_BLOCK, FP8_GROUP), data, scale))
    expected = scale[torch.arange(n) // 128][:, torch.arange(k) // 128].T
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=0)


def test_weights_are_kept_and_reload_keeps_addresses() -> None:
    scheme = Scheme.parse("nvfp4-w4a4")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    first, _ = make_linear(scheme, 16, 64, x)
    data, scale, global_scale, _ = stored_weight(scheme, torch.randn(16, 64))
    arguments = {"global_scale": global_scale, "input_scale": input_scale_for(scheme, x), "bias": torch.randn(16)}
    fresh = prepare_linear(scheme, data, scale, **arguments)
    assert fresh.weight.data_ptr() == data.data_ptr()
    address = first.weight.data_ptr()
    again = prepare_linear(scheme, data, scale, into=first, **arguments)
    assert again is first
    assert again.weight.data_ptr() == address
    assert torch.equal(linear(x, again), linear(x, fresh))


def test_reload_of_other_shapes_is_refused() -> None:
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    first, _ = make_linear(Scheme.parse("bf16"), 16, 64, x)
    with pytest.raises(ArgumentError, match=r"into must hold weights of the same scheme and shapes; its n is 16"):
        prepare_linear(Scheme.parse("bf16"), torch.zeros(8, 64, dtype=torch.bfloat16), into=first)


@pytest.mark.parametrize("name", [name for name in SCHEMES if supports_linear_on_tiles(name)])
@pytest.mark.parametrize(("n", "k"), [(72, 160), (130, 100), (65, 2880)])
def test_weights_in_tiles_give_the_same_result(name: str, n: int, k: int) -> None:
    """The reference on the layout that kernels read: scales of rows, of blocks and biases are where they belong."""
    scheme = SCHEMES[name]
    k -= k % max(scheme.weight.k_multiple, scheme.activation.k_multiple)
    x = torch.randn(5, k).to(activation_dtype(scheme))
    plain, _ = make_linear(scheme, n, k, x)
    tiles = in_tiles(plain)
    scales = 64 * scheme.weight.packed // scheme.weight.k_multiple if scheme.weight.k_multiple > 1 else 0  # of a row
    assert tiles.weight.shape == (-(-n // 64), -(-plain.weight[0].nbytes // 64), 64 * (64 + scales))
    assert torch.equal(linear(x, tiles), linear(x, plain))
    assert linear(x[0], tiles).shape == (n,)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_dtype(out_dtype: torch.dtype) -> None:
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    w, dense = make_linear(Scheme.parse("bf16"), 16, 64, x)
    assert w.bias is not None
    y = linear(x, w, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    assert torch.equal(y, (x.float() @ dense.T + w.bias).to(out_dtype))
    with pytest.raises(ArgumentError, match=r"out_dtype must be None, bfloat16 or float16 or float32; got torch\.int8"):
        linear(x, w, out_dtype=torch.int8)


NV, MX = Scheme.parse("nvfp4-w4a4"), Scheme.parse("mxfp8")
U8, E4, F32 = torch.uint8, torch.float8_e4m3fn, torch.float32


@pytest.mark.parametrize(
    ("scheme", "weight", "scale", "others", "sentence"),
    [
        (
            NV,
            torch.zeros(4, 8, dtype=F32),
            None,
            {},
            r"weight must be a tensor of uint8 with shape \(\*, \*\) = \(N, K / 2",
        ),
        (
            NV,
            torch.zeros(4, 8, dtype=U8),
            torch.zeros(4, 1, dtype=E4),
            {},
            r"global_scale must be given for nvfp4-w4a4",
        ),
        (
            NV,
            torch.zeros(4, 8, dtype=U8),
            torch.zeros(4, 1, dtype=E4),
            {"global_scale": torch.ones(1)},
            r"input_scale must be given for nvfp4-w4a4",
        ),
        (
            NV,
            torch.zeros(4, 8, dtype=U8),
            torch.zeros(4, 2, dtype=E4),
            {"global_scale": torch.ones(1), "input_scale": torch.ones(1)},
            r"scale must be a tensor of float8_e4m3fn with shape \(4, 1\) for nvfp4 weights; got .* \(4, 2\)",
        ),
        (
            NV,
            torch.zeros(4, 8, dtype=U8),
            torch.zeros(4, 1, dtype=E4),
            {"global_scale": torch.ones(3), "input_scale": torch.ones(1)},
            r"global_scale must be of one value or of shape \(4,\) = \(N,\)",
        ),
        (MX, torch.zeros(4, 32, dtype=E4), torch.zeros(4, 1), {}, r"scale must be a tensor of uint8 or float8_e8m0fnu"),
        (
            MX,
            torch.zeros(4, 32, dtype=E4),
            torch.zeros(4, 1, dtype=U8),
            {"input_scale": torch.ones(1)},
            r"input_scale must be None for mxfp8",
        ),
        (
            MX,
            torch.zeros(4, 32, dtype=E4),
            torch.zeros(4, 1, dtype=U8),
            {"bias": torch.zeros(5)},
            r"bias must be .* with shape \(4,\) = \(N,\); got float32 \(5,\)",
        ),
        (
            Scheme.parse("bf16"),
            torch.zeros(4, 8, dtype=torch.bfloat16),
            torch.ones(1),
            {},
            r"scale must be None for bf16",
        ),
    ],
)
def test_bad_weights_get_a_sentence(
    scheme: Scheme,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    others: dict[str, torch.Tensor],
    sentence: str,
) -> None:
    with pytest.raises(ArgumentError, match="prepare_linear: " + sentence):
        prepare_linear(scheme, weight, scale, **others)


def test_unsupported_k_names_the_block() -> None:
    with pytest.raises(UnsupportedError, match=r"mxfp8 needs K to be a multiple of 32, .*; got 48"):
        prepare_linear(MX, torch.zeros(4, 48, dtype=E4), torch.zeros(4, 2, dtype=U8))


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(3, 5, dtype=torch.bfloat16), r"shape \(\.\.\., 64\) = \(\.\.\., K\); got bfloat16 \(3, 5\)"),
        (torch.zeros(3, 64), r"bfloat16 or float16 .*; got float32"),
        ([1.0], r"got \[1\.0\]"),
    ],
)
def test_bad_x_gets_a_sentence(x: torch.Tensor, sentence: str) -> None:
    weights, _ = make_linear(MX, 16, 64, torch.randn(2, 64))
    with pytest.raises(ArgumentError, match="linear: x must be .*" + sentence):
        linear(x, weights)
