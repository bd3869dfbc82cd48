"""Paged attention and cache writes against a loop over queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from b12x_core import ArgumentError, paged_attention, write_kv_cache


class Batch:
    """Requests with their keys and values written to shuffled pages through `write_kv_cache`."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        v_dim: int | None = None,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """`lengths` are (new tokens, tokens in all) of each request."""
        v_dim = dim if v_dim is None else v_dim
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        pages = [-(-total // page_size) for _, total in lengths]
        order = (torch.randperm(sum(pages) + 2) + 1).int()
        # Every slot that is not written holds NaN: reading one shows.
        self.k_cache = torch.full((len(order) + 1, page_size, kv_heads, dim), torch.nan).to(kv_dtype)
        self.v_cache = torch.full((len(order) + 1, page_size, kv_heads, v_dim), torch.nan).to(kv_dtype)
        self.block_table = torch.zeros(len(lengths), max([*pages, 1]) + 3, dtype=torch.int32)
        self.k = [torch.randn(total, kv_heads, dim).to(dtype) for _, total in lengths]
        self.v = [torch.randn(total, kv_heads, v_dim).to(dtype) for _, total in lengths]
        used = 0
        for row, count in enumerate(pages):
            self.block_table[row, :count] = order[used : used + count]
            used += count
            position = torch.arange(lengths[row][1])
            slots = self.block_table[row, position // page_size].long() * page_size + position % page_size
            write_kv_cache(
                self.k[row], self.v[row], self.k_cache, self.v_cache, slots, k_scale=k_scale, v_scale=v_scale
            )
        self.seq_lens = torch.tensor([total for _, total in lengths], dtype=torch.int32)
        starts = [0]
        for new, _ in lengths:
            starts.append(starts[-1] + new)
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        self.q = torch.randn(starts[-1], heads, dim).to(dtype)

    def run(self, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            return_lse=True,
            **options,  # type: ignore[arg-type]
        )

    def expected(
        self,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A query and a head at a time, in float64."""
        tokens, heads, dim = self.q.shape
        out = torch.zeros(tokens, heads, self.v_cache.shape[3], dtype=torch.float64)
        lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
        for row, total in enumerate(self.seq_lens.tolist()):
            begin, end = self.query_start_loc[row : row + 2].tolist()
            for token in range(begin, end if total else begin):
                position = total - end + token
                first = 0 if window is None else max(0, position - window + 1)
                last = position + 1 if causal else total
                for head in range(heads):
                    kv = head // (heads // self.k[row].shape[1])
                    score = self.k[row][first:last, kv].double() @ self.q[token, head].double()
                    score = score * (dim**-0.5 if scale is None else scale)
                    if soft_cap is not None:
                        score = soft_cap * torch.tanh(score / soft_cap)
                    joined = score if sinks is None else torch.cat([score, sinks[head : head + 1].double()])
                    lse[token, head] = joined.logsumexp(0)
                    out[token, head] = (score - lse[token, head]).exp() @ self.v[row][first:last, kv].double()
        return out, lse


def assert_same(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=2**-7, atol=2e-3)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=1e-5, atol=1e-4)


MIXED = [(0, 0), (1, 1), (17, 80), (0, 5), (9, 9), (1, 33), (4, 64)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 1.0},
        {"window": 1},
        {"window": 16},
        {"window": 33},
        {"soft_cap": 2.0},
        {"sinks": torch.tensor([10.0, -3.0, 0.0, 2.0])},
        {"window": 20, "soft_cap": 5.0, "scale": 0.3, "sinks": torch.tensor([1.0, 0.0, -5.0, 2.0])},
        {"causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_mixed_batch(options: dict[str, object], page_size: int) -> None:
    batch = Batch(MIXED, page_size=page_size)
    assert_same(batch.run(**options), batch.expected(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim"),
    [(1, 1, 16, 16), (6, 1, 64, 64), (9, 3, 64, 64), (4, 4, 192, 128), (4, 2, 256, 256)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_and_dims(heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype) -> None:
    batch = Batch([(3, 40), (1, 7)], heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim, dtype=dtype)
    assert_same(batch.run(), batch.expected())


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "head"])
def test_fp8_cache_with_scales(kv_dtype: torch.dtype, per_head: bool) -> None:
    k_scale = torch.tensor([0.25, 0.5]) if per_head else torch.tensor(0.25)
    v_scale = torch.tensor([2.0, 0.5]) if per_head else torch.tensor(0.5)
    batch = Batch([(3, 40), (1, 7)], kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale)
    for tensors, scale in ((batch.k, k_scale), (batch.v, v_scale)):
        for i, tensor in enumerate(tensors):
            tensors[i] = (tensor.float() / scale.reshape(-1, 1)).to(kv_dtype).float() * scale.reshape(-1, 1)
    assert_same(batch.run(k_scale=k_scale, v_scale=v_scale), batch.expected())


def test_fp8_cache_saturates() -> None:
    cache = torch.zeros(1, 4, 1, 16, dtype=torch.float8_e4m3fn)
    k = torch.full((1, 1, 16), 1000.0, dtype=torch.bfloat16)
    write_kv_cache(k, -k, cache, v_cache := cache.clone(), torch.tensor([2]), k_scale=torch.tensor(1.0))
    assert cache[0, 2].float().unique().tolist() == [448.0]
    assert v_cache[0, 2].float().unique().tolist() == [-448.0]
    assert not cache.float()[0, [0, 1, 3]].any()


def test_padding_gives_zero_and_minus_infinity() -> None:
    batch = Batch([(2, 20), (1, 0), (1, 3)])
    batch.q = torch.cat([batch.q, torch.full((3, 4, 32), torch.nan, dtype=torch.bfloat16)])
    out, lse = batch.run(sinks=torch.zeros(4))
    assert not out[[2, 4, 5, 6]].any()
    assert (lse[[2, 4, 5, 6]] == -math.inf).all()
    assert out[[0, 1, 3]].isfinite().all()


def test_freed_pages_behind_the_window_are_not_read() -> None:
    batch = Batch([(1, 100)], page_size=16)
    expected = batch.run(window=20)
    batch.k_cache[batch.block_table[0, 0]] = torch.nan
    batch.v_cache[batch.block_table[0, 0]] = torch.nan
    batch.block_table[0, 1] = -1
    assert_same(batch.run(window=20), (expected[0].double(), expected[1].double()))


def test_strided_views_of_one_buffer_and_slots() -> None:
    """Keys and values side by side in one page, as engines allocate them; slot -1 and rows past the slots skipped."""
    buffer = torch.zeros(5, 2, 16, 2 * 32, dtype=torch.bfloat16)
    k_cache, v_cache = (buffer[:, i].unflatten(-1, (2, 32)) for i in range(2))
    k, v = torch.randn(5, 2, 32, dtype=torch.bfloat16), torch.randn(5, 2, 32, dtype=torch.bfloat16)
    write_kv_cache(k, v, k_cache, v_cache, torch.tensor([17, -1, 79, 0]))
    assert torch.equal(buffer[1, 0, 1].view(2, 32), k[0])
    assert torch.equal(buffer[4, 1, 15].view(2, 32), v[2])
    assert torch.equal(buffer[0, 0, 0].view(2, 32), k[3])
    assert buffer.abs().sum(-1).count_nonzero() == 6


def test_out_is_written_in_place() -> None:
    batch = Batch([(2, 20)])
    out = torch.full((2, 4, 32), torch.nan, dtype=torch.bfloat16)
    expected = batch.run()[0]
    returned = paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, out=out
    )
    assert returned is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"q": torch.zeros(2, 4, 16, dtype=torch.bfloat16)},
            r"q must be .* \(\*, \*, 32\) = \(T, H, D\); got bfloat16",
        ),
        ({"q": torch.zeros(2, 3, 32, dtype=torch.bfloat16)}, r"q must be of a number of heads that is a multiple of 2"),
        ({"q": torch.zeros(2, 4, 32, dtype=torch.float16)}, r"k_cache must be of float16 like q, or FP8"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int32)}, r"block_table must be .* \(1, \*\) = \(R, W\)"),
        ({"block_table": torch.zeros(1, 4)}, r"block_table must be a tensor of int32 .*; got float32 \(1, 4\)"),
        ({"query_start_loc": torch.zeros(1, dtype=torch.int32)}, r"query_start_loc must be .* \(2,\) = \(R \+ 1,\)"),
        ({"window": 0}, r"window must be at least 1, the query's own key; got 0"),
        ({"window": 4, "causal": False}, r"window must be None where causal is False; got 4"),
        ({"soft_cap": -1.0}, r"soft_cap must be positive and finite; got -1.0"),
        ({"sinks": torch.zeros(3)}, r"sinks must be .* \(4,\) = \(H,\); got float32 \(3,\)"),
        ({"v_cache": torch.zeros(1, 16, 2, 32, dtype=torch.bfloat16)}, r"v_cache must be of the dtype, pages"),
        ({"out": torch.zeros(2, 4, 32)}, r"out must be a tensor of bfloat16 .*; got float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_gets_a_sentence(change: dict[str, object], sentence: str) -> None:
    batch = Batch([(2, 20)])
    arguments = {
        name: getattr(batch, name) for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc")
    }
    with pytest.raises(ArgumentError, match="paged_attention: " + sentence):
        paged_attention(**(arguments | change))  # type: ignore[arg-type]


def test_bad_cache_writes_get_a_sentence() -> None:
    cache = torch.zeros(2, 16, 2, 32, dtype=torch.float8_e4m3fn)
    k = torch.zeros(3, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(
        ArgumentError, match=r"slot_mapping must be of at most 3 slots, the rows of k; got int64 \(4,\)"
    ):
        write_kv_cache(k, k, cache, cache.clone(), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        ArgumentError, match=r"k_scale must be of one value or of shape \(2,\) = \(Hkv,\); got float32 \(3,\)"
    ):
        write_kv_cache(k, k, cache, cache.clone(), torch.zeros(3, dtype=torch.int64), k_scale=torch.ones(3))
    with pytest.raises(ArgumentError, match=r"k_cache must be contiguous along the head dim"):
        write_kv_cache(k, k, cache.transpose(2, 3), cache, torch.zeros(3, dtype=torch.int64))
