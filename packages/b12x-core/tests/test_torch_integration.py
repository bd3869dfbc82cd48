"""The ops as torch sees them: schemas, fake implementations, tracing without graph breaks, refusals on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from b12x_core import (
    FP8_GROUP,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    SCHEMES,
    SILU,
    Format,
    Scheme,
    SwiGLU,
    fused_moe,
    linear,
    paged_attention,
    quantize,
    write_kv_cache,
)
from b12x_core.ops._library import eager
from b12x_core.ops.linear import in_tiles
from conftest import activation_dtype, make_linear, supports_linear_on_tiles
from test_attention import Batch
from test_moe import make_experts, routing
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.b12x_core


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("bytewise_allclose")
@pytest.mark.parametrize("name", SCHEMES)
def test_linear_opcheck(name: str) -> None:
    scheme = SCHEMES[name]
    x = torch.randn(3, 64).to(activation_dtype(scheme))
    w, _ = make_linear(scheme, 24, 64, x)
    arguments = (x, w.weight, w.scale, w.global_scale, w.input_scale, w.bias, name, None)
    torch.library.opcheck(OPS.linear.default, arguments)


@pytest.mark.usefixtures("bytewise_allclose")
@pytest.mark.parametrize("name", [name for name in SCHEMES if supports_linear_on_tiles(name)])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_linear_tiles_opcheck(name: str, out_dtype: torch.dtype | None) -> None:
    scheme = SCHEMES[name]
    x = torch.randn(3, 2, 64).to(activation_dtype(scheme))
    w = in_tiles(make_linear(scheme, 24, 64, x)[0])
    arguments = (x, w.weight, w.affine, w.scale, w.input_scale, name, 24, out_dtype)
    torch.library.opcheck(OPS.linear_tiles.default, arguments)


@pytest.mark.usefixtures("bytewise_allclose")
@pytest.mark.parametrize("fmt", [FP8_TENSOR, FP8_ROW, FP8_GROUP, MXFP8, MXFP4, NVFP4], ids=str)
def test_quantize_opcheck(fmt: Format) -> None:
    scale = torch.ones(1) if fmt in (NVFP4, FP8_TENSOR) else None
    torch.library.opcheck(OPS.quantize.default, (torch.randn(3, 2, 64), fmt.name, scale))


@pytest.mark.usefixtures("bytewise_allclose")
@pytest.mark.parametrize("name", ["bf16", "fp8-block", "nvfp4-w4a4", "mxfp4-w4a16"])
def test_fused_moe_opcheck(name: str) -> None:
    experts, *_ = make_experts(SCHEMES[name], 4, 64, 32, SILU)
    weights, ids = routing(3, 4, 2)
    tensors = [getattr(experts, f"{m}{part}") for m in ("w13", "w2") for part in MATRIX]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    rest = (None, torch.empty_like(x), name, "silu", True, 1.0, 0.0, None, False, False, 1.0)
    torch.library.opcheck(OPS.fused_moe.default, (x, weights, ids, *tensors, *rest))


MATRIX = ("", "_scale", "_global_scale", "_input_scale", "_bias")


@pytest.mark.usefixtures("bytewise_allclose")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_attention_and_cache_opcheck(kv_dtype: torch.dtype) -> None:
    batch = Batch([(2, 20), (1, 3)], kv_dtype=kv_dtype)
    one = torch.ones(1) if kv_dtype.itemsize == 1 else None
    torch.library.opcheck(
        OPS.paged_attention.default,
        (
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            torch.empty_like(batch.q),
            torch.empty(3, 4),
            0.2,
            True,
            8,
            30.0,
            torch.zeros(4),
            one,
            one,
        ),
    )
    k = torch.randn(3, 2, 32, dtype=torch.bfloat16)
    slots = torch.tensor([1, -1, 5])
    torch.library.opcheck(OPS.write_kv_cache.default, (k, k, batch.k_cache, batch.v_cache, slots, one, one))


def assert_traces(function: Callable[[torch.Tensor], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Compiled without a graph break, equal to eager, in at most two graphs whatever the number of rows."""
    expected = [function(x) for x in inputs]
    counter = CompileCounter()
    counted = torch.compile(function, fullgraph=True, backend=counter)
    functional = torch.compile(function, fullgraph=True, backend="aot_eager")
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(counted(x), y, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(functional(x), y, rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["bf16", "fp8-tensor", "fp8-block", "nvfp4-w4a4", "mxfp8", "mxfp4-w4a16"])
def test_linear_traces(name: str) -> None:
    rows = [torch.randn(m, 64, dtype=torch.bfloat16) for m in range(1, 18)]
    weights, _ = make_linear(SCHEMES[name], 24, 64, rows[-1])
    assert_traces(lambda x: linear(torch.relu(x), weights) + 1, rows)


def test_moe_traces() -> None:
    experts, *_ = make_experts(Scheme.parse("nvfp4-w4a4"), 4, 64, 32, SILU)
    weights, ids = routing(17, 4, 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        return fused_moe(x, experts, weights[:rows], ids[:rows], activation=SwiGLU(limit=7.0)) + x

    assert_traces(function, [torch.randn(m, 64, dtype=torch.bfloat16) for m in range(1, 18)])


def test_quantize_traces() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        q = quantize(x, MXFP8)
        return q.data.float() * q.scale.float().repeat_interleave(32, -1)

    assert_traces(function, [torch.randn(m, 64) for m in range(1, 5)])


def test_attention_and_cache_write_trace_together() -> None:
    """The write must stay before the read although both only mutate."""
    batch = Batch([(2, 20), (1, 3)])
    slots = torch.tensor([batch.block_table[0, 1] * 16 + 3, -1, batch.block_table[1, 0] * 16 + 2])

    def function(k: torch.Tensor) -> torch.Tensor:
        write_kv_cache(k, k * 2, batch.k_cache, batch.v_cache, slots)
        out = torch.zeros_like(batch.q)
        tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        paged_attention(batch.q, batch.k_cache, batch.v_cache, *tables, out=out, window=8, sinks=torch.zeros(4))
        return out + 1

    assert_traces(function, [torch.randn(3, 2, 32, dtype=torch.bfloat16) for _ in range(2)])


def test_meta_tensors_have_the_shapes_of_real_ones() -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        data, scale = OPS.quantize(torch.empty(3, 160, dtype=torch.bfloat16), "nvfp4", torch.ones(1))
    assert (data.shape, data.dtype) == ((3, 80), torch.uint8)
    assert (scale.shape, scale.dtype) == ((3, 10), torch.float8_e4m3fn)


def test_an_op_is_called_through_the_dispatcher_where_anybody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    assert not eager(x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert eager(x)
    assert not eager(torch.nn.Parameter(x))
    with FakeTensorMode():
        assert not eager(x)
    with monkeypatch.context() as context:
        context.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not eager(x)
