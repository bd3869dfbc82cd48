"""A batch as `b12x_core.paged_attention` takes it, computed on the device from SGLang's own tensors.

Nothing here depends on a length that the device holds: shapes follow from the batch size, the tokens a request has in a
step of its mode, and the longest sequence that may be. So what fills the tensors can be recorded into a CUDA graph, and
a replay with other lengths and pages reads those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from b12x_core import UnsupportedError
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from b12x_sglang.flags import FLAG

if TYPE_CHECKING:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class BatchMetadata:
    """One batch of R requests and T rows.

    Attributes:
        seq_lens: (R,) int32, tokens of each request, this step's included.
        query_start_loc: (R + 1,) int32, first query row of each request; rows from the last entry on are padding.
        block_table: (R, W) int32, pages of each request.
        window_block_table: the same over the second pool of a hybrid one, None without it.
        window_slots: (at least T,) int64, slots of this step's tokens in that pool, None without it.
        ahead: tokens of a request in this step that SGLang does not count in its own lengths.
        fills_tables: False where another metadata fills the tables that this one shares.
    """

    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    window_block_table: torch.Tensor | None
    window_slots: torch.Tensor | None
    ahead: int
    fills_tables: bool = True

    def in_window_pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages and the slots of this step's tokens for a layer in the second pool of a hybrid one."""
        assert self.window_block_table is not None
        assert self.window_slots is not None
        return self.window_block_table, self.window_slots


@dataclass(frozen=True)
class Buffers:
    """Tensors of the largest batch, whose front is that of any other. Named as in `BatchMetadata`."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    window_block_table: torch.Tensor | None
    window_slots: torch.Tensor | None
    fills_tables: bool = True

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether a batch of so many requests and tokens fits."""
        return self.seq_lens.shape[0] >= requests and (
            self.window_slots is None or self.window_slots.shape[0] >= tokens
        )

    def sharing_tables(self, first: Buffers) -> Buffers:
        """These lengths and slots with the tables of `first`, which fills them."""
        return replace(
            self, block_table=first.block_table, window_block_table=first.window_block_table, fills_tables=False
        )

    def metadata(self, requests: int, tokens: int, query_start_loc: torch.Tensor, ahead: int) -> BatchMetadata:
        """The front for a batch."""
        tables, slots = self.window_block_table, self.window_slots
        return BatchMetadata(
            seq_lens=self.seq_lens[:requests],
            query_start_loc=query_start_loc,
            block_table=self.block_table[:requests],
            window_block_table=None if tables is None else tables[:requests],
            window_slots=None if slots is None else slots[:tokens],
            ahead=ahead,
            fills_tables=self.fills_tables,
        )


class MetadataBuilder:
    """Fills metadata from SGLang's table of token slots.

    Args:
        req_to_token: (requests + 1, longest sequence) int32: SGLang's slot of each token of each request. Row 0 and
            page 0 of the cache belong to no request: what pads a batch reads and writes there.
        page_size: slots a page.
        window_pool: the hybrid pool, None without one.
    """

    def __init__(self, req_to_token: torch.Tensor, page_size: int, window_pool: SWAKVPool | None) -> None:
        self._page_size = page_size
        self._window_pool = window_pool
        # A page's slots follow one another, so its first slot tells the page.
        self._page_starts = req_to_token[:, ::page_size]

    def allocate(self, requests: int, tokens: int, width: int | None = None) -> Buffers:
        """Tensors for batches of up to so many requests and tokens, and `width` pages (None for the most)."""
        table = (requests, self._page_starts.shape[1] if width is None else width)
        new, hybrid = self._page_starts.new_zeros, self._window_pool is not None
        return Buffers(
            seq_lens=new(requests),
            block_table=new(table),
            window_block_table=new(table) if hybrid else None,
            window_slots=new(tokens, dtype=torch.int64) if hybrid else None,
        )

    def eager(self, batch: ForwardBatch, step: int | None) -> BatchMetadata:
        """Metadata of a batch in tensors of its own.

        Args:
            batch: SGLang's batch.
            step: which of the drafting steps it is, from 0; None for another batch.
        """
        requests, slots = batch.batch_size, batch.out_cache_loc
        tokens = 0 if slots is None else slots.shape[0]
        buffers = self.allocate(requests, tokens, self._width(batch))
        if batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify():
            starts = self.uniform_starts(requests, rows_per_request(batch))
        else:
            # SGLang may have padded the lengths, as it may the rows.
            starts = self._page_starts.new_zeros(requests + 1)
            torch.cumsum(batch.extend_seq_lens[:requests], 0, dtype=torch.int32, out=starts[1:])
        metadata = buffers.metadata(requests, tokens, starts, tokens_ahead(batch, step))
        self.fill(metadata, batch)
        return metadata

    def uniform_starts(self, requests: int, rows: int) -> torch.Tensor:
        """First row of each request where all have as many: (requests + 1,) int32."""
        return torch.arange(requests + 1, dtype=torch.int32, device=self._page_starts.device) * rows

    def fill(self, metadata: BatchMetadata, batch: ForwardBatch) -> None:
        """Bring metadata up to date with a batch of its shape. Work on the device only."""
        requests = metadata.seq_lens.shape[0]
        torch.add(batch.seq_lens[:requests], metadata.ahead, out=metadata.seq_lens)
        if metadata.fills_tables:
            self._fill_tables(metadata, batch.req_pool_indices[:requests])
        if metadata.window_slots is not None and batch.out_cache_loc is not None:
            slots = self._window_slots(batch.out_cache_loc)
            metadata.window_slots[: slots.shape[0]].copy_(slots)

    def _fill_tables(self, metadata: BatchMetadata, rows: torch.Tensor) -> None:
        starts = self._page_starts[:, : metadata.block_table.shape[1]]
        torch.index_select(starts, 0, rows, out=metadata.block_table)
        if metadata.window_block_table is not None:
            # Slots that left the window map to page 0, and are not read.
            metadata.window_block_table.copy_(self._window_slots(metadata.block_table))
            metadata.window_block_table.floor_divide_(self._page_size)
        if self._page_size > 1:
            metadata.block_table.floor_divide_(self._page_size)

    def _window_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots in the second pool of a hybrid one."""
        assert self._window_pool is not None
        translated: torch.Tensor = self._window_pool.translate_loc_from_full_to_swa(slots)
        return translated

    def _width(self, batch: ForwardBatch) -> int | None:
        """Pages of the longest request where the host knows the lengths, None where it does not.

        Under speculation it may know those of an earlier step.
        """
        lengths = batch.seq_lens_cpu
        if lengths is None or batch.spec_info is not None:
            return None
        return -(-int(lengths.max()) // self._page_size) if lengths.numel() else 0


def rows_per_request(batch: ForwardBatch) -> int:
    """Rows of each request in a batch where all have as many.

    Raises:
        UnsupportedError: the batch is not one of those.
    """
    mode: ForwardMode = batch.forward_mode
    if mode.is_decode_or_idle():
        return 1
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
            raise UnsupportedError(
                f"attention backend {FLAG} verifies as many tokens of one request as of another; "
                "unset SGLANG_RAGGED_VERIFY_MODE"
            )
        rows: int = batch.spec_info.num_tokens_per_req
        return rows
    raise UnsupportedError(
        f"attention backend {FLAG} has no graph for a {mode.name} batch; choose --cuda-graph-backend-prefill breakable "
        "or disabled"
    )


def tokens_ahead(batch: ForwardBatch, step: int | None) -> int:
    """Tokens of this step that SGLang's lengths leave out: those to verify, or those drafted so far."""
    if batch.forward_mode.is_target_verify():
        return rows_per_request(batch)
    return 0 if step is None else step + 1
