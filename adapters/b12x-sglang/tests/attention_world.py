"""Requests of known keys and values in SGLang's own pools, and graphs recorded on a CPU, for tests of the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from b12x_sglang.flags import FLAG
from b12x_sglang.hooks.attention import runner
from b12x_sglang.hooks.context import layer_context
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HEADS, KV_HEADS, DIM, REQUESTS, CONTEXT = 4, 2, 16, 4, 128
WINDOW = 20
"""Visible keys of a layer with a window, its own included."""


def pages(page: int) -> int:
    """Pages of a pool, some of which stay free."""
    return 320 // page + 8


def layer(index: int = 0, *, window: int | None = None, **others: Any) -> RadixAttention:
    """SGLang's attention layer."""
    size = -1 if window is None else window - 1
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=index, sliding_window_size=size, **others)


def pool(page: int, dtype: torch.dtype = torch.bfloat16, **others: Any) -> MHATokenToKVPool:
    """SGLang's KV cache for two layers."""
    size = (pages(page) - 1) * page
    chosen = {"head_num": KV_HEADS, "head_dim": DIM, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}
    return MHATokenToKVPool(size=size, page_size=page, dtype=dtype, **{**chosen, **others})


def hybrid_pool(page: int, dtype: torch.dtype = torch.bfloat16) -> SWAKVPool:
    """SGLang's hybrid KV cache: layer 0 in one pool, layer 1 in another of half the size; no page is in that yet."""
    size = (pages(page) - 1) * page
    hybrid = SWAKVPool(
        size=size,
        size_swa=(pages(page) // 2 - 1) * page,
        page_size=page,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
    )
    hybrid.register_mapping(torch.cat([torch.zeros(size + page, dtype=torch.int64), torch.tensor([-1])]))
    return hybrid


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Causal attention of the last len(q) of len(k) tokens, in float32: (T, H * Dv)."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    if window is not None:
        mask &= ~mask.tril(len(k) - len(q) - window)
    q, k, v = (t.float().transpose(0, 1) for t in (q.view(-1, HEADS, DIM), k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


@dataclass
class World:
    """A model of two layers, its pools, and the tokens that its requests have by now.

    Attributes:
        cache: the KV cache.
        layers: the layers.
        table: SGLang's table of token slots; request r is its row r + 1.
        keys, values: of each request, all tokens so far.
    """

    cache: Any
    layers: list[RadixAttention]
    table: ReqToTokenPool = field(init=False)
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.table = ReqToTokenPool(size=REQUESTS, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
        self.table.req_to_token.fill_(7)  # stale, as of earlier requests
        self.table.req_to_token[0] = 0
        size = self.layers[0].v_head_dim
        self.keys = [torch.zeros(0, KV_HEADS, DIM).bfloat16() for _ in range(REQUESTS)]
        self.values = [torch.zeros(0, KV_HEADS, size).bfloat16() for _ in range(REQUESTS)]
        self._free = (1 + torch.randperm(pages(self.page) - 1)).tolist()
        self._free_window = (1 + torch.randperm(pages(self.page) // 2 - 1)).tolist()

    @property
    def page(self) -> int:
        """Tokens a page."""
        return int(self.cache.page_size)

    @property
    def runner(self) -> Any:
        """What stands for SGLang's `ModelRunner`."""
        return runner(nn.ModuleList(self.layers), self.cache, self.table, torch.bfloat16, "cpu")

    def create(self, build: Callable[[Any], Any] | None = None, **arguments: Any) -> Any:
        """A backend under published server arguments; SGLang's registry builds it unless told otherwise."""
        with layer_context(torch.bfloat16, "cpu", page_size=self.page, **arguments):
            return (build or ATTENTION_BACKENDS[FLAG])(self.runner)

    def append(self, request: int, count: int) -> torch.Tensor:
        """Give a request new tokens, and pages for them as it needs; returns the tokens' slots."""
        before = len(self.keys[request])
        self.keys[request] = torch.cat([self.keys[request], torch.randn(count, KV_HEADS, DIM).bfloat16()])
        values = torch.randn(count, *self.values[request].shape[1:]).bfloat16()
        self.values[request] = torch.cat([self.values[request], values])
        row = self.table.req_to_token[request + 1]
        for position in range(before, before + count):
            if position % self.page == 0:
                row[position : position + self.page] = self._new_page() * self.page + torch.arange(self.page)
        return row[before : before + count].long()

    def _new_page(self) -> int:
        page = self._free.pop()
        if isinstance(self.cache, SWAKVPool):
            second = self._free_window.pop()
            offsets = torch.arange(self.page)
            self.cache.full_to_swa_index_mapping[page * self.page + offsets] = second * self.page + offsets
        return page

    def evict(self, request: int) -> None:
        """Take from the second pool of a hybrid one the pages that left a request's window, and reuse them."""
        gone = (len(self.keys[request]) - WINDOW) // self.page
        for page in range(max(gone, 0)):
            slots = self.table.req_to_token[request + 1, page * self.page : (page + 1) * self.page].long()
            second = int(self.cache.full_to_swa_index_mapping[slots[0]])
            if second:
                self._free_window.append(second // self.page)
                self.cache.full_to_swa_index_mapping[slots] = 0

    def new(self, requests: Sequence[int], counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The last tokens of requests, one after the other: keys and values."""
        parts = list(zip(requests, counts, strict=True))
        keys = [self.keys[request][len(self.keys[request]) - count :] for request, count in parts]
        values = [self.values[request][len(self.values[request]) - count :] for request, count in parts]
        return torch.cat(keys), torch.cat(values)

    def expected(
        self, q: torch.Tensor, requests: Sequence[int], counts: Sequence[int], window: int | None = None
    ) -> torch.Tensor:
        """What attention of the requests' last tokens gives."""
        parts = zip(requests, q.split(list(counts)), strict=True)
        return torch.cat([dense(part, self.keys[r], self.values[r], window) for r, part in parts])

    def store(self, backend: AttentionBackend, requests: Sequence[int], lengths: Sequence[int]) -> None:
        """Give requests tokens and write them by an extension of the backend, in every layer."""
        slots = torch.cat([self.append(request, count) for request, count in zip(requests, lengths, strict=True)])
        k, v = self.new(requests, lengths)
        batch = self.batch(ForwardMode.EXTEND, requests, lengths, slots)
        backend.init_forward_metadata(batch)
        for module in self.layers:
            attend(backend, module, torch.zeros(len(k), HEADS * DIM).bfloat16(), k, v, batch)

    def batch(
        self,
        mode: ForwardMode,
        requests: Sequence[int],
        counts: Sequence[int],
        slots: torch.Tensor | None,
        behind: int = 0,
        **others: Any,
    ) -> ForwardBatch:
        """SGLang's batch of requests with `counts` new tokens each; its lengths are `behind` those of the requests."""
        lengths = torch.tensor([len(self.keys[request]) - behind for request in requests], dtype=torch.int64)
        chosen = {"seq_lens_cpu": lengths.clone(), "seq_lens_sum": int(lengths.sum()), **others}
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=None,
            req_pool_indices=torch.tensor(requests, dtype=torch.int64) + 1,
            seq_lens=lengths,
            out_cache_loc=slots,
            extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
            **chosen,
        )


def attend(
    backend: AttentionBackend,
    module: RadixAttention,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    batch: ForwardBatch,
    **options: Any,
) -> torch.Tensor:
    """The layer's own forward."""
    with forward_context(ForwardContext(attn_backend=backend)):
        out: torch.Tensor = module(q, k, v, batch, **options)
    return out


def queries(rows: int) -> torch.Tensor:
    """Random queries: (rows, H * D)."""
    return torch.randn(rows, HEADS * DIM).bfloat16()


def chain(tokens: int) -> Any:
    """What a batch says of its speculation: tokens of each request."""
    return SimpleNamespace(num_tokens_per_req=tokens, ragged_verify_layout=None)


class Recording(TorchDispatchMode):
    """A CUDA graph on a CPU: records the operations of a block, and replays them into the same memory.

    What Python decided and every shape and number stays as it was; only what the tensors hold may differ. An operation
    that reads a value on the host fails, as it does under capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value of the device is read on the host")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run the operations again."""
        for func, args, kwargs, result in self._calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
