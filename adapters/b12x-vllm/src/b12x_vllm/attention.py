"""vLLM's B12X attention backend, served by `b12x_core.paged_attention` and `b12x_core.write_kv_cache`.

vLLM describes a layer's KV cache as a logical [B, H, N, C] view: page, slot, token in page, content. Here a page has
two slots, keys then values, each [N, Hkv * D], so that either is one block of memory. Where values have another head
size than keys, a page has a single slot whose content is a token's keys followed by its values. Strides over B are
vLLM's business (pages of several layers may alternate), so only strided views are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import b12x_core
import torch
from b12x_core import ArgumentError, UnsupportedError
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Tokens a page. vLLM splits another block size of its own (hybrid models have odd ones) into pages that divide it."""

KV_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Values of --kv-cache-dtype that are served, and what they store; None is the model's dtype."""


def register() -> None:
    """Make --attention-backend B12X mean this backend. May be called again."""
    register_backend(AttentionBackendEnum.B12X, f"{__name__}.{B12xAttentionBackend.__name__}")


def split_kv(kv_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and the values in a layer's cache.

    Args:
        kv_cache: [B, 2, N, Hkv * D], or [B, 1, N, Hkv * (D + Dv)] where Dv differs from D. Any strides over B, H and N.
        num_kv_heads, head_size: Hkv and D.

    Returns:
        Keys [B, N, Hkv, D] and values [B, N, Hkv, Dv], views of the same memory.

    Raises:
        ArgumentError: the cache has neither shape.
    """
    _, slots, _, content = kv_cache.shape
    keys = num_kv_heads * head_size
    if slots == 2 and content == keys:
        k, v = kv_cache.unbind(1)
    elif slots == 1 and content > keys and content % num_kv_heads == 0:
        k, v = kv_cache[:, 0, :, :keys], kv_cache[:, 0, :, keys:]
    else:
        raise ArgumentError(
            f"KV cache must be [pages, 2, tokens, {keys}] or [pages, 1, tokens, more than {keys}] "
            f"for {num_kv_heads} KV heads of {head_size}; got {tuple(kv_cache.shape)}"
        )
    return k.unflatten(-1, (num_kv_heads, -1)), v.unflatten(-1, (num_kv_heads, -1))


class B12xAttentionBackend(AttentionBackend):
    """What vLLM asks before it uses the backend: names, what is served, how the KV cache is laid out."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(KV_DTYPES)
    # vLLM calls do_kv_cache_update before forward, and not at all for a layer that reads another layer's cache.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Name of the enum member that `register` overrides; vLLM looks it up again."""
        return "B12X"

    @staticmethod
    def get_impl_cls() -> type[B12xAttentionImpl]:
        """The layer's implementation."""
        return B12xAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[B12xMetadataBuilder]:
        """The builder of a batch's metadata."""
        return B12xMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Page sizes."""
        return list(PAGE_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks join the softmax of every query."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Any window from 1 key."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """An FP8 cache may have one scale a KV head."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why the core does not serve such a layer on this platform's device, None if it does.

        The device is the core's to judge, so `supports_compute_capability` stays as permissive as vLLM has it.
        """
        name = kv_cache_dtype or "auto"
        if name not in KV_DTYPES:
            return f"a KV cache of type {name} is not served; --kv-cache-dtype may be {', '.join(KV_DTYPES)}"
        # A block of vLLM may be any multiple of the least page; it is split into pages that divide it.
        page_size = max((size for size in PAGE_SIZES if (block_size or PAGE_SIZES[0]) % size == 0), default=block_size)
        return b12x_core.supports_attention(
            head_dim=head_size,
            page_size=page_size or PAGE_SIZES[0],
            q_dtype=dtype,
            kv_dtype=KV_DTYPES[name] or dtype,
            device=current_platform.device_type,
        ).reason

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The layer's cache with the slots that the module's docstring describes."""
        if spec.state_content_bytes is not None:
            return spec
        itemsize = get_dtype_size(spec.dtype)
        if spec.head_size_v == spec.head_size:
            return replace(spec, num_head_slots=2, state_content_bytes=spec.num_kv_heads * spec.head_size * itemsize)
        content = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * itemsize
        return replace(spec, num_head_slots=1, state_content_bytes=content)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts in which a page's slots are contiguous, layer by layer or with the layers' pages in turn."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)


@dataclass
class B12xAttentionMetadata(AttentionMetadata):
    """One batch, as `b12x_core.paged_attention` takes it. All tensors stay on the device and are read there.

    Attributes:
        query_start_loc: (R + 1,) int32, first query row of each request.
        seq_lens: (R,) int32, tokens of each request, this step's included. 0 for a request that only pads the batch.
        block_table: (R, W) int32, pages of each request.
        slot_mapping: (T,) int64, where this step's keys go.
        num_actual_tokens: query rows of the batch, padding for a graph included.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int


class B12xMetadataBuilder(AttentionMetadataBuilder[B12xAttentionMetadata]):
    """Builds a batch's metadata: references to vLLM's own buffers, so that a captured graph reads what they hold later.

    Single tokens and the 1 + n tokens of a request under speculation are decodes alike: vLLM moves them to the front of
    the batch, and captures batches of nothing else into graphs.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> B12xAttentionMetadata:
        """Metadata of a batch.

        Raises:
            UnsupportedError: the batch is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("attention backend B12X serves causal attention only; this batch is not causal")
        return B12xAttentionMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
        )

    def update_block_table(
        self, metadata: B12xAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> B12xAttentionMetadata:
        """The same batch over the pages of another KV cache group."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class B12xAttentionImpl(AttentionImpl[B12xAttentionMetadata]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Takes vLLM's arguments (the first ten by position).

        Args:
            sinks: (num_heads,) logits that join each softmax. Loaded into after construction.
            others: what vLLM passes for features that are not served.

        Raises:
            UnsupportedError: a feature of the layer is not served.
        """
        for present, feature in (
            (alibi_slopes is not None, "ALiBi"),
            (attn_type != AttentionType.DECODER, f"{AttentionType(attn_type).value} attention"),
            (kv_cache_dtype not in KV_DTYPES, f"a KV cache of type {kv_cache_dtype}"),
            (bool(others), f"the layer's option {', '.join(others)}"),
        ):
            if present:
                raise UnsupportedError(f"attention backend B12X does not serve {feature}; choose another backend")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        # vLLM counts as the core does: the keys that are visible, the query's own included.
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store key (T, Hkv, D) and value (T, Hkv, Dv) at slots (T',) int64; slot -1 is skipped.

        An FP8 cache stores them divided by the layer's scales, () or (Hkv,) float32, which `forward` multiplies with.
        """
        if kv_cache.numel() == 0:
            return
        k_cache, v_cache = self._caches(kv_cache)
        # Padding for a graph may make the slots more than the rows that the layer was given.
        slots = slot_mapping[: key.shape[0]]
        b12x_core.write_kv_cache(key, value, k_cache, v_cache, slots, k_scale=layer._k_scale, v_scale=layer._v_scale)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: B12xAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend query (T, H, D) to the stored keys, write output (T, H, Dv) in place and return it.

        Rows that belong to no request are set to 0, all of them where there is no batch or no cache (profiling).

        Raises:
            UnsupportedError: vLLM asked for a quantized output, which `fused_output_quant_supported` denies.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("attention backend B12X does not quantize its output")
        if attn_metadata is None or kv_cache.numel() == 0:
            return output.zero_()
        # Under a full graph the metadata may describe more padding than the layer was given rows for. Requests that
        # pad have no rows, so only the tensors' own rows count.
        rows = min(query.shape[0], output.shape[0])
        output[rows:].zero_()
        k_cache, v_cache = self._caches(kv_cache)
        b12x_core.paged_attention(
            query[:rows],
            k_cache,
            v_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            scale=self.scale,
            window=self.sliding_window,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
            out=output[:rows],
        )
        return output

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, N, Hkv, D or Dv] in the dtype that they are stored in."""
        stored = KV_DTYPES[self.kv_cache_dtype]
        # vLLM allocates an FP8 cache as bytes.
        typed = kv_cache.view(stored) if stored is not None and stored.itemsize == 1 else kv_cache
        return split_kv(typed, self.num_kv_heads, self.head_size)
