"""The attention backend over SGLang's own pools: batches of every mode, what is written where, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import b12x_core
import pytest
import torch
from attention_world import (
    CONTEXT,
    DIM,
    HEADS,
    KV_HEADS,
    WINDOW,
    World,
    attend,
    chain,
    hybrid_pool,
    layer,
    pool,
    queries,
)
from b12x_core import UnsupportedError
from b12x_core.adapters import AttentionCase
from b12x_sglang.attention.backend import B12xAttentionBackend, refuse_layer
from b12x_sglang.flags import FLAG
from b12x_sglang.hooks import attention as hook
from b12x_sglang.hooks.context import layer_context
from sglang.srt.environ import envs
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MHATokenToKVPoolMXFP8
from sglang.srt.model_executor.forward_batch_info import ForwardMode

CLOSE = {"rtol": 0.02, "atol": 0.02}


def world(page: int = 16, cache: Any = None, **options: Any) -> World:
    return World(pool(page) if cache is None else cache, [layer(0, **options), layer(1, window=WINDOW, **options)])


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_extension_after_prefixes_in_pages_of_any_size_and_layout(page: int, hnd: bool, mode: ForwardMode) -> None:
    with envs.SGLANG_USE_HND_KVCACHE.override(hnd):
        here = world(page, pool(page))
    assert here.cache.kv_cache_layout == ("hnd" if hnd else "nhd")
    backend = here.create()
    here.store(backend, [0, 1, 2], [30, 1, 17])
    requests, counts = [2, 0, 3, 1], [5, 1, 33, 1]  # chunks, a decode, a prompt without a prefix
    slots = torch.cat([here.append(*pair) for pair in zip(requests, counts, strict=True)])
    k, v = here.new(requests, counts)
    batch = here.batch(mode, requests, counts, slots)
    backend.init_forward_metadata(batch)
    q = queries(sum(counts))
    for module, window in zip(here.layers, (None, WINDOW), strict=True):
        out = attend(backend, module, q, k, v, batch)
        torch.testing.assert_close(out.float(), here.expected(q, requests, counts, window), **CLOSE)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("host", [True, False])
def test_decode_with_and_without_lengths_on_the_host(page: int, host: bool) -> None:
    here = world(page)
    backend = here.create()
    assert not backend.needs_cpu_seq_lens
    assert backend.max_context_len == CONTEXT
    here.store(backend, [0, 1], [40, 15])
    slots = torch.cat([here.append(0, 1), here.append(1, 1)])
    k, v = here.new([0, 1], [1, 1])
    batch = here.batch(ForwardMode.DECODE, [0, 1], [1, 1], slots)
    if not host:
        batch.seq_lens_cpu = batch.seq_lens_sum = None
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata.block_table.shape == (2, -(-41 // page) if host else CONTEXT // page)
    q = queries(2)
    out = attend(backend, here.layers[0], q, k, v, batch)
    torch.testing.assert_close(out.float(), here.expected(q, [0, 1], [1, 1]), **CLOSE)


def test_rows_and_slots_of_padding_are_left_out() -> None:
    here = world()
    backend = here.create()
    slots = here.append(0, 3)
    k, v = here.new([0], [3])
    batch = here.batch(ForwardMode.EXTEND, [0], [3], torch.cat([slots, torch.zeros(2, dtype=torch.int64)]))
    backend.init_forward_metadata(batch)
    q = queries(5)
    padding = torch.full((2, KV_HEADS, DIM), torch.nan).bfloat16()
    out = attend(backend, here.layers[0], q, torch.cat([k, padding]), torch.cat([v, padding]), batch)
    torch.testing.assert_close(out[:3].float(), here.expected(q[:3], [0], [3]), **CLOSE)
    assert (out[3:] == 0).all()


def test_a_place_for_the_result_is_used() -> None:
    here = world()
    backend = here.create()
    slots = here.append(0, 3)
    batch = here.batch(ForwardMode.EXTEND, [0], [3], slots)
    backend.init_forward_metadata(batch)
    batch._attn_output = torch.full((3, HEADS * DIM), torch.nan).bfloat16()
    q = queries(3)
    out = attend(backend, here.layers[0], q, *here.new([0], [3]), batch)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    torch.testing.assert_close(batch._attn_output.float(), here.expected(q, [0], [3]), **CLOSE)


def test_an_idle_batch_has_no_metadata_and_no_result() -> None:
    here = world()
    backend = here.create()
    batch = here.batch(ForwardMode.IDLE, [], [], torch.zeros(0, dtype=torch.int64))
    backend.init_forward_metadata(batch)
    none = torch.zeros(0, KV_HEADS, DIM).bfloat16()
    assert attend(backend, here.layers[0], queries(0), none, none, batch).shape == (0, HEADS * DIM)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", ["parameter", "number", "none"])
def test_fp8_cache_is_divided_by_the_scales_and_the_layers_tokens_are_not(dtype: torch.dtype, kind: str) -> None:
    here = world(16, pool(16, dtype))
    backend, module = here.create(), here.layers[0]
    k_scale, v_scale = (1.0, 1.0) if kind == "none" else (0.25, 2.0)
    if kind != "none":
        wrap: Callable[[float], Any] = float if kind == "number" else torch.tensor
        module.k_scale, module.v_scale = wrap(k_scale), wrap(v_scale)
    slots = here.append(0, 4)
    k, v = here.new([0], [4])
    before = k.clone(), v.clone()
    batch = here.batch(ForwardMode.EXTEND, [0], [4], slots)
    backend.init_forward_metadata(batch)
    q = queries(4)
    out = attend(backend, module, q, k, v, batch)
    torch.testing.assert_close((k, v), before, rtol=0, atol=0)
    for stored, tokens, scale in zip(here.cache.get_kv_buffer(0), (k, v), (k_scale, v_scale), strict=True):
        assert stored.dtype == dtype
        wide = (tokens.float() / scale).to(dtype).float()
        torch.testing.assert_close(stored[slots].float(), wide, rtol=0, atol=0)
    shown_k, shown_v = (
        stored[slots].float() * scale
        for stored, scale in zip(here.cache.get_kv_buffer(0), (k_scale, v_scale), strict=True)
    )
    here.keys[0], here.values[0] = shown_k, shown_v
    torch.testing.assert_close(out.float(), here.expected(q, [0], [4]), **CLOSE)


def test_values_of_another_size() -> None:
    here = world(16, pool(16, v_head_dim=24), v_head_dim=24)
    backend = here.create()
    slots = here.append(0, 20)
    batch = here.batch(ForwardMode.EXTEND, [0], [20], slots)
    backend.init_forward_metadata(batch)
    q = queries(20)
    out = attend(backend, here.layers[0], q, *here.new([0], [20]), batch)
    assert out.shape == (20, HEADS * 24)
    torch.testing.assert_close(out.float(), here.expected(q, [0], [20]), **CLOSE)


@pytest.mark.parametrize("shared", [True, False])
def test_tokens_that_are_not_to_be_saved_are_not(shared: bool) -> None:
    here = world()
    backend = here.create()
    here.store(backend, [0], [9])
    stored = here.cache.get_key_buffer(0).clone()
    batch = here.batch(ForwardMode.EXTEND, [0], [2], here.table.req_to_token[1, 7:9].long())
    backend.init_forward_metadata(batch)
    q, other = queries(2), torch.ones(2, KV_HEADS, DIM).bfloat16()
    tokens = (None, None) if shared else (other, other)
    out = attend(backend, here.layers[0], q, *tokens, batch, save_kv_cache=shared)
    torch.testing.assert_close(here.cache.get_key_buffer(0), stored, rtol=0, atol=0)
    torch.testing.assert_close(out.float(), here.expected(q, [0], [2]), **CLOSE)


def test_soft_cap_scale_and_sinks_reach_the_op() -> None:
    sinks = torch.linspace(-1, 3, HEADS).bfloat16()
    here = World(pool(16), [layer(0, logit_cap=5.0), layer(1)])
    here.layers[0].scaling = 0.7
    backend = here.create()
    slots = here.append(0, 20)
    batch = here.batch(ForwardMode.EXTEND, [0], [20], slots)
    backend.init_forward_metadata(batch)
    q = queries(20)
    out = attend(backend, here.layers[0], q, *here.new([0], [20]), batch, sinks=sinks)
    keys, values = (buffer.view(-1, 16, KV_HEADS, DIM) for buffer in here.cache.get_kv_buffer(0))
    table = (slots[::16] // 16).int()[None]
    expected = b12x_core.paged_attention(
        q.view(20, HEADS, DIM),
        keys,
        values,
        table,
        torch.tensor([20], dtype=torch.int32),
        torch.tensor([0, 20], dtype=torch.int32),
        scale=0.7,
        soft_cap=5.0,
        sinks=sinks,
    )
    torch.testing.assert_close(out, expected.flatten(1), rtol=0, atol=0)


@pytest.mark.parametrize("page", [1, 4])
def test_hybrid_pool_keeps_windows_in_slots_of_their_own(page: int) -> None:
    here = world(page, hybrid_pool(page))
    backend = here.create()
    here.store(backend, [0, 1], [10, 3])
    for _ in range(14):
        slots = torch.cat([here.append(0, 3), here.append(1, 1)])
        k, v = here.new([0, 1], [3, 1])
        batch = here.batch(ForwardMode.EXTEND, [0, 1], [3, 1], slots)
        backend.init_forward_metadata(batch)
        q = queries(4)
        for module, window in zip(here.layers, (None, WINDOW), strict=True):
            out = attend(backend, module, q, k, v, batch)
            torch.testing.assert_close(out.float(), here.expected(q, [0, 1], [3, 1], window), **CLOSE)
        second = here.cache.full_to_swa_index_mapping[slots]
        torch.testing.assert_close(here.cache.swa_kv_pool.get_key_buffer(0)[second], k, rtol=0, atol=0)
        torch.testing.assert_close(here.cache.full_kv_pool.get_key_buffer(0)[slots], k, rtol=0, atol=0)
        here.evict(0)
    assert len(here.keys[0]) > WINDOW + 2 * page
    assert int(here.cache.full_to_swa_index_mapping[here.table.req_to_token[1, 0].long()]) == 0


def test_verification_counts_from_before_the_proposed_tokens() -> None:
    here = world()
    backend = here.create()
    here.store(backend, [0, 1], [14, 31])
    slots = torch.cat([here.append(0, 3), here.append(1, 3)])
    k, v = here.new([0, 1], [3, 3])
    batch = here.batch(ForwardMode.TARGET_VERIFY, [0, 1], [0, 0], slots, behind=3, spec_info=chain(3))
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata.seq_lens.tolist() == [17, 34]
    assert backend.forward_metadata.query_start_loc.tolist() == [0, 3, 6]
    q = queries(8)  # two rows of padding
    padding = torch.zeros(2, KV_HEADS, DIM).bfloat16()
    out = attend(backend, here.layers[1], q, torch.cat([k, padding]), torch.cat([v, padding]), batch)
    torch.testing.assert_close(out[:6].float(), here.expected(q[:6], [0, 1], [3, 3], WINDOW), **CLOSE)
    assert (out[6:] == 0).all()


def test_extension_of_a_draft_counts_the_tokens_with_it() -> None:
    here = world()
    backend = here.create()
    here.store(backend, [0, 1], [14, 31])
    slots = torch.cat([here.append(0, 3), here.append(1, 3)])
    batch = here.batch(ForwardMode.DRAFT_EXTEND_V2, [0, 1], [3, 3], slots, spec_info=chain(3))
    backend.init_forward_metadata(batch)
    q = queries(6)
    out = attend(backend, here.layers[0], q, *here.new([0, 1], [3, 3]), batch)
    torch.testing.assert_close(out.float(), here.expected(q, [0, 1], [3, 3]), **CLOSE)


def test_a_verification_of_unequal_lengths_is_refused() -> None:
    here = world()
    backend = here.create()
    ragged = SimpleNamespace(num_tokens_per_req=3, ragged_verify_layout=object())
    here.append(0, 4)
    batch = here.batch(ForwardMode.TARGET_VERIFY, [0], [0], torch.arange(3), behind=3, spec_info=ragged)
    with pytest.raises(UnsupportedError, match="as many tokens of one request as of another"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("ours", ["prefill", "decode"])
def test_one_phase_beside_another_backend(ours: str) -> None:
    here = world()

    def both(runner: Any) -> HybridAttnBackend:
        runner.kv_cache_dtype = torch.bfloat16
        names = {phase: FLAG if phase == ours else "torch_native" for phase in ("prefill", "decode")}
        children = {f"{phase}_backend": ATTENTION_BACKENDS[name](runner) for phase, name in names.items()}
        return HybridAttnBackend(runner, **children)

    backend = here.create(both, **{f"{ours}_attention_backend": FLAG, "attention_backend": "torch_native"})
    assert isinstance(getattr(backend, f"{ours}_backend"), B12xAttentionBackend)
    slots = here.append(0, 20)
    batch = here.batch(ForwardMode.EXTEND, [0], [20], slots, extend_prefix_lens=torch.tensor([0], dtype=torch.int32))
    backend.init_forward_metadata(batch)
    q = queries(20)
    out = attend(backend, here.layers[0], q, *here.new([0], [20]), batch)
    torch.testing.assert_close(out.float(), here.expected(q, [0], [20]), **CLOSE)
    slots = here.append(0, 1)
    batch = here.batch(ForwardMode.DECODE, [0], [1], slots)
    backend.init_forward_metadata(batch)
    q = queries(1)
    out = attend(backend, here.layers[0], q, *here.new([0], [1]), batch)
    torch.testing.assert_close(out.float(), here.expected(q, [0], [1]), **CLOSE)


@pytest.mark.parametrize("name", ["score_mod", "rel_bias", "q_rope"])
def test_options_that_would_change_the_result_are_refused(name: str) -> None:
    here = world()
    backend = here.create()
    here.store(backend, [0], [3])
    batch = here.batch(ForwardMode.DECODE, [0], [1], here.table.req_to_token[1, 2:3].long())
    backend.init_forward_metadata(batch)
    q = queries(1)
    asked = attend(backend, here.layers[0], q, None, None, batch, **{name: None})
    torch.testing.assert_close(asked.float(), here.expected(q, [0], [1]), **CLOSE)
    with pytest.raises(UnsupportedError, match=f"does not serve the option {name}"):
        attend(backend, here.layers[0], q, None, None, batch, **{name: torch.ones(1)})


def changed(**attributes: Any) -> RadixAttention:
    module = layer(0)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only attention"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional attention"),
        ({"use_irope": True}, "attention in chunks of 8192 tokens"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "soft caps by sigmoid"),
        ({"xai_temperature_len": 1024}, "temperatures that depend on the position"),
        ({"pos_encoding_mode": "ALIBI"}, "positions inside attention"),
    ],
)
def test_layers_that_are_not_served_end_the_start_up(attributes: dict[str, Any], sentence: str) -> None:
    def build(runner: Any) -> Any:
        runner.attention_chunk_size = 8192
        runner.model_config.context_len = 8193
        return ATTENTION_BACKENDS[FLAG](runner)

    with pytest.raises(UnsupportedError, match=sentence):
        World(pool(16), [layer(1), changed(**attributes)]).create(build)


def test_chunks_that_no_sequence_outgrows_are_served() -> None:
    def build(runner: Any) -> Any:
        runner.attention_chunk_size = runner.model_config.context_len = 8192
        return ATTENTION_BACKENDS[FLAG](runner)

    World(pool(16), [changed(use_irope=True)]).create(build)


def test_a_layer_without_what_is_refused_is_served() -> None:
    refuse_layer(changed(logit_capping_method="sigmoid", use_irope=True), None)


@pytest.mark.parametrize(
    ("attribute", "value", "sentence"),
    [
        ("use_mla_backend", True, "multi-head latent attention"),
        ("model_config", SimpleNamespace(is_encoder_decoder=True), "encoder-decoder models"),
        ("kv_index_translator", SimpleNamespace(is_translating=True), "a unified memory pool"),
        ("dtype", torch.float32, "queries must be bfloat16 or float16; got float32"),
        ("dtype", torch.float16, "a KV cache beside float16 queries holds .* got bfloat16"),
    ],
)
def test_configurations_that_are_not_served_end_the_start_up(attribute: str, value: Any, sentence: str) -> None:
    def build(runner: Any) -> Any:
        setattr(runner, attribute, value)
        return ATTENTION_BACKENDS[FLAG](runner)

    with pytest.raises(UnsupportedError, match=sentence):
        world().create(build)


def test_a_page_size_that_the_core_does_not_take_ends_the_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    served = b12x_core.supports_attention

    def only_multiples_of_16(*, page_size: int, **others: Any) -> b12x_core.Support:
        if page_size % 16:
            return b12x_core.Support(False, f"pages must hold a multiple of 16 tokens; got {page_size}")
        return served(page_size=page_size, **others)

    monkeypatch.setattr(b12x_core, "supports_attention", only_multiples_of_16)
    world(16).create()
    with pytest.raises(UnsupportedError, match="b12x: pages must hold a multiple of 16 tokens; got 1"):
        world(1).create()


def test_a_head_dim_that_the_core_does_not_take_ends_the_start_up() -> None:
    with pytest.raises(UnsupportedError, match="v_head_dim must be a multiple of 8"):
        world(16, pool(16, v_head_dim=20), v_head_dim=20).create()


@pytest.mark.parametrize("kind", [MHATokenToKVPoolMXFP8, type("Own", (MHATokenToKVPool,), {})])
def test_pools_with_storage_of_their_own_end_the_start_up(kind: type) -> None:
    cache = pool(16)
    cache.__class__ = kind
    with pytest.raises(UnsupportedError, match=f"plain 16-bit and FP8 KV caches; this one is a {kind.__name__}"):
        world(16, cache).create()


def test_hook_says_what_sglang_has_no_way_to_say() -> None:
    assert "single key" in (hook.cannot_express(AttentionCase(4, 2, 16, page_size=16, num_pages=4, window=1)) or "")
    assert "at least 2 pages" in (hook.cannot_express(AttentionCase(4, 2, 16, page_size=16, num_pages=1)) or "")
    assert hook.cannot_express(AttentionCase(4, 2, 16, page_size=1, num_pages=4, window=2)) is None


@pytest.mark.parametrize("page", [1, 16])
def test_hook_builds_the_engines_layer_around_the_backend(page: int) -> None:
    case = AttentionCase(
        HEADS, KV_HEADS, DIM, page_size=page, num_pages=64, window=7, soft_cap=5.0, sinks=torch.zeros(HEADS)
    )
    built = hook.SglangAttention(case)
    assert isinstance(built._layer, RadixAttention)
    assert isinstance(built._backend, B12xAttentionBackend)
    assert built._layer.sliding_window_size == 6
    table = (1 + torch.randperm(62)[: 32 // page]).int()[None]
    slots = (table[0, :, None] * page + torch.arange(page)).flatten()[:20]
    key = torch.randn(20, KV_HEADS, DIM).bfloat16()
    built.write(key, key, torch.cat([slots[:19], torch.tensor([-1])]))
    length, starts = torch.tensor([19], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    query = torch.randn(2, HEADS, DIM).bfloat16()
    keys, values = (buffer.view(-1, page, KV_HEADS, DIM) for buffer in built._pool.get_kv_buffer(0))
    assert not keys.view(-1, KV_HEADS, DIM)[slots[19]].any()
    expected = b12x_core.paged_attention(
        query, keys, values, table, length, starts, window=7, soft_cap=5.0, sinks=torch.zeros(HEADS)
    )
    torch.testing.assert_close(built.run(query, table, length, starts), expected, rtol=0, atol=0)


def test_name_is_in_the_registry_once_plugins_are_loaded() -> None:
    with layer_context(torch.bfloat16, "cpu"):
        assert ATTENTION_BACKENDS[FLAG].__module__ == "b12x_sglang.attention"
