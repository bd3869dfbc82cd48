"""The attention backend's translation between vLLM and the core: layouts, scales, padding, metadata, refusals."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import b12x_core
import pytest
import torch
from b12x_core import ArgumentError, UnsupportedError
from b12x_core.adapters import AttentionCase
from b12x_vllm.attention import (
    PAGE_SIZES,
    B12xAttentionBackend,
    B12xAttentionImpl,
    B12xAttentionMetadata,
    B12xMetadataBuilder,
    split_kv,
)
from b12x_vllm.hooks import attention as hook
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layer_kv_cache_shape_bytes, compute_layout_strides
from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size

HEADS, KV_HEADS, DIM, PAGES, PAGE = 4, 2, 16, 6, 16
LAYER = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))


def impl(**others: Any) -> B12xAttentionImpl:
    arguments = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **others}
    return B12xAttentionImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, **arguments)


def spec(value_dim: int = DIM, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    plain = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, head_size_v=value_dim, dtype=dtype)
    return B12xAttentionBackend.customize_spec(plain)


def cache(value_dim: int = DIM, layout_index: int = 0) -> torch.Tensor:
    """The second of two layers' caches, as vLLM would view it in one of the backend's layouts."""
    layout, described = B12xAttentionBackend.supported_kv_cache_layouts()[layout_index], spec(value_dim)
    shape = (2, *compute_layer_kv_cache_shape_bytes(described, PAGES))
    buffer = torch.zeros(2 * PAGES * described.page_size_bytes, dtype=torch.int8)
    views = buffer.as_strided(shape, compute_layout_strides(described, PAGES, 2, layout))
    return views[1].view(torch.bfloat16)


def metadata(lengths: list[int], new: list[int], rows: int | None = None) -> B12xAttentionMetadata:
    """A batch whose requests own pages 1, 2, ... one after the other."""
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    width = max(-(-length // PAGE) for length in lengths)
    table = torch.arange(1, 1 + len(lengths) * width, dtype=torch.int32).view(-1, width)
    slots = torch.full((sum(new),), -1)
    return B12xAttentionMetadata(starts, torch.tensor(lengths, dtype=torch.int32), table, slots, rows or sum(new))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last len(q) of len(k) tokens, in float32."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("value_dim", [DIM, 8])
def test_what_is_written_is_found_by_views_of_the_same_memory(value_dim: int, layout: int) -> None:
    kv_cache = cache(value_dim, layout)
    key = torch.randn(3, KV_HEADS, DIM).bfloat16()
    value = torch.randn(3, KV_HEADS, value_dim).bfloat16()
    impl().do_kv_cache_update(LAYER, key, value, kv_cache, torch.tensor([PAGE + 2, -1, 5 * PAGE]))
    keys, values = split_kv(kv_cache, KV_HEADS, DIM)
    assert keys.shape == (PAGES, PAGE, KV_HEADS, DIM)
    assert values.shape == (PAGES, PAGE, KV_HEADS, value_dim)
    assert keys.untyped_storage().data_ptr() == kv_cache.untyped_storage().data_ptr()
    for stored, tokens in ((keys, key), (values, value)):
        expected = torch.zeros_like(stored)
        expected[1, 2], expected[5, 0] = tokens[0], tokens[2]
        torch.testing.assert_close(stored, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("value_dim", [DIM, 8])
def test_forward_attends_in_place_and_clears_padding(value_dim: int, layout: int) -> None:
    kv_cache, batch = cache(value_dim, layout), metadata([19, 5], [3, 1], rows=6)
    keys = [torch.randn(n, KV_HEADS, DIM).bfloat16() for n in (19, 5)]
    values = [torch.randn(n, KV_HEADS, value_dim).bfloat16() for n in (19, 5)]
    slots = torch.cat([torch.arange(PAGE, PAGE + 19), torch.arange(3 * PAGE, 3 * PAGE + 5)])
    layer = impl()
    layer.do_kv_cache_update(LAYER, torch.cat(keys), torch.cat(values), kv_cache, slots)
    query = torch.randn(6, HEADS, DIM).bfloat16()
    output = torch.full((7, HEADS, value_dim), torch.nan).bfloat16()
    assert layer.forward(LAYER, query, query, query, kv_cache, batch, output) is output
    expected = torch.cat([dense(query[:3], keys[0], values[0]), dense(query[3:4], keys[1], values[1])])
    torch.testing.assert_close(output[:4].float(), expected, rtol=0.02, atol=0.02)
    assert (output[4:] == 0).all()


def test_profiling_and_empty_caches_give_zeros() -> None:
    query = torch.randn(2, HEADS, DIM).bfloat16()
    batch = metadata([2], [2])
    for kv_cache, meta in ((cache(), None), (torch.tensor([]), batch)):
        output = torch.full_like(query, torch.nan)
        impl().do_kv_cache_update(LAYER, query, query, torch.tensor([]), torch.tensor([0, 1]))
        assert (impl().forward(LAYER, query, query, query, kv_cache, meta, output) == 0).all()


@pytest.mark.parametrize(("slots", "stored"), [([3], 1), ([3, 4, -1, -1], 2)])
def test_slots_may_be_fewer_or_more_than_rows(slots: list[int], stored: int) -> None:
    kv_cache, key = cache(), torch.ones(2, KV_HEADS, DIM).bfloat16()
    impl().do_kv_cache_update(LAYER, key, key, kv_cache, torch.tensor(slots))
    assert int((kv_cache[0, 0] != 0).all(-1).sum()) == stored


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)],
)
@pytest.mark.parametrize("per_head", [False, True])
def test_fp8_cache_is_bytes_divided_by_the_layers_scales(name: str, dtype: torch.dtype, per_head: bool) -> None:
    scales = torch.tensor([0.25, 4.0]) if per_head else torch.tensor(0.25)
    layer = SimpleNamespace(_k_scale=scales, _v_scale=scales * 2)
    kv_cache = torch.zeros(PAGES, 2, PAGE, KV_HEADS * DIM, dtype=torch.uint8)
    key, value = torch.randn(2, 1, KV_HEADS, DIM).bfloat16()
    quantized = impl(kv_cache_dtype=name)
    quantized.do_kv_cache_update(layer, key, value, kv_cache, torch.tensor([PAGE]))
    found = kv_cache[1, :, 0].view(dtype).view(2, KV_HEADS, DIM).float()
    wide = torch.stack([key[0].float() / scales.view(-1, 1), value[0].float() / (2 * scales.view(-1, 1))])
    torch.testing.assert_close(found, wide.to(dtype).float(), rtol=0, atol=0)
    output = torch.empty(1, HEADS, DIM).bfloat16()
    quantized.forward(layer, torch.zeros_like(output), key, value, kv_cache, metadata([1], [1]), output)
    shown = (found[1] * 2 * scales.view(-1, 1)).repeat_interleave(HEADS // KV_HEADS, 0)
    torch.testing.assert_close(output[0].float(), shown, rtol=0.01, atol=0.01)


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"KV cache must be .* got \(6, 4, 16, 16\)"):
        split_kv(torch.zeros(PAGES, 4, PAGE, DIM), KV_HEADS, DIM)


@pytest.mark.parametrize("value_dim", [DIM, 8])
def test_specification_holds_keys_and_values_and_nothing_else(value_dim: int) -> None:
    described = spec(value_dim)
    assert described.page_size_bytes == PAGE * KV_HEADS * (DIM + value_dim) * 2
    assert B12xAttentionBackend.customize_spec(described) is described


@pytest.mark.parametrize(("block", "page"), [(16, 16), (128, 128), (1024, 1024), (528, 16), (1088, 64), (2048, 1024)])
def test_vllm_splits_its_blocks_into_pages(block: int, page: int) -> None:
    described = customize_attention_spec(B12xAttentionBackend, spec().copy_with_new_block_size(block))
    assert select_common_block_size(block, [B12xAttentionBackend], [described]) == page
    assert page in PAGE_SIZES
    assert B12xAttentionBackend.supports_block_size(block)


def builder(speculative_tokens: int = 0) -> B12xMetadataBuilder:
    speculation = SimpleNamespace(num_speculative_tokens=speculative_tokens, parallel_drafting=False)
    config = SimpleNamespace(
        speculative_config=speculation if speculative_tokens else None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    return B12xMetadataBuilder(spec(), ["layer"], config, torch.device("cpu"))


def common(**others: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, 4, 5], dtype=torch.int32)
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor([20, 7], dtype=torch.int32),
        "num_reqs": 2,
        "num_actual_tokens": 5,
        "max_query_len": 4,
        "max_seq_len": 20,
        "block_table_tensor": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        "slot_mapping": torch.arange(5),
    }
    return CommonAttentionMetadata(**fields, **others)


def test_metadata_refers_to_the_buffers_of_the_engine() -> None:
    batch = common()
    built = builder().build(0, batch)
    assert built.query_start_loc is batch.query_start_loc
    assert built.seq_lens is batch.seq_lens
    assert built.block_table is batch.block_table_tensor
    table, slots = torch.zeros(2, 9, dtype=torch.int32), torch.arange(5) + 100
    moved = builder().update_block_table(built, table, slots)
    assert moved.block_table is table
    assert moved.slot_mapping is slots
    assert moved.seq_lens is batch.seq_lens
    assert built.block_table is batch.block_table_tensor


@pytest.mark.parametrize(("tokens", "threshold"), [(0, 1), (3, 4)])
def test_verification_counts_as_decode(tokens: int, threshold: int) -> None:
    assert builder(tokens).reorder_batch_threshold == threshold


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])])
def test_batches_that_are_not_causal_are_refused(causal: bool | torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="causal attention only"):
        builder().build(0, common(causal=causal))


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"alibi_slopes": [0.5]}, "does not serve ALiBi"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "does not serve encoder_only attention"),
        ({"kv_cache_dtype": "nvfp4"}, "does not serve a KV cache of type nvfp4"),
        ({"chunk_lookback": 3}, "does not serve the layer's option chunk_lookback"),
    ],
)
def test_layers_that_are_not_served_are_refused(others: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        impl(**others)


def test_quantized_output_is_refused() -> None:
    query = torch.zeros(1, HEADS, DIM).bfloat16()
    with pytest.raises(UnsupportedError, match="does not quantize its output"):
        impl().forward(LAYER, query, query, query, cache(), metadata([1], [1]), query, output_scale=torch.ones(1))


def reasons(**others: Any) -> str:
    asked: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": True,
        "device_capability": DeviceCapability(12, 0),
        "attn_type": AttentionType.DECODER,
        "has_sliding_window": True,
    }
    return "; ".join(B12xAttentionBackend.validate_configuration(**{**asked, **others}))


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"dtype": torch.float16},
        {"head_size": 80},
        {"block_size": 528},
        *({"kv_cache_dtype": name} for name in ("bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", None)),
    ],
)
def test_what_the_core_serves_is_accepted(others: dict[str, Any]) -> None:
    assert reasons(**others) == ""


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"head_size": 20}, "head_dim must be a multiple of 8 from 16 to 512; got 20"),
        ({"dtype": torch.float32}, "queries must be bfloat16 or float16; got float32"),
        ({"kv_cache_dtype": "float16"}, "a KV cache beside bfloat16 queries holds"),
        ({"kv_cache_dtype": "nvfp4"}, "a KV cache of type nvfp4 is not served"),
        ({"block_size": 24}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"attn_type": AttentionType.ENCODER}, "attention type .* not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_dcp": True}, "DCP not supported"),
    ],
)
def test_what_is_not_served_is_refused_before_the_layer_is_built(others: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, reasons(**others))


def test_a_device_without_kernels_is_refused_in_the_words_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = b12x_core.Support(False, "no paged_attention kernel for bfloat16 on compute capability 8.0")
    monkeypatch.setattr(b12x_core, "supports_attention", lambda **_: refusal)
    assert reasons() == refusal.reason


@pytest.mark.parametrize("page_size", [8, 48, 2048])
def test_hook_says_which_pages_vllm_cannot_have(page_size: int) -> None:
    case = AttentionCase(HEADS, KV_HEADS, DIM, page_size=page_size, num_pages=4)
    assert "pages of 16, 32, ... 1024 tokens" in (hook.cannot_express(case) or "")


def test_hook_builds_the_engines_layer_around_the_backend() -> None:
    case = AttentionCase(
        HEADS, KV_HEADS, DIM, page_size=PAGE, num_pages=PAGES, window=7, soft_cap=5.0, sinks=torch.zeros(HEADS)
    )
    layer = hook.VllmAttention(case)
    assert isinstance(layer._layer.impl, B12xAttentionImpl)
    assert layer._layer.kv_cache.shape == (PAGES, 2, PAGE, KV_HEADS * DIM)
    assert layer._layer.impl.sliding_window == 7
    key = torch.randn(20, KV_HEADS, DIM).bfloat16()
    layer.write(key, key, torch.arange(PAGE, PAGE + 20))
    table, length = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    query = torch.randn(2, HEADS, DIM).bfloat16()
    keys, values = split_kv(layer._layer.kv_cache, KV_HEADS, DIM)
    expected = b12x_core.paged_attention(
        query, keys, values, table, length, starts, window=7, soft_cap=5.0, sinks=torch.zeros(HEADS)
    )
    torch.testing.assert_close(layer.run(query, table, length, starts), expected, rtol=0, atol=0)
