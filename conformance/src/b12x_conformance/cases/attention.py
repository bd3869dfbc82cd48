"""Cases of an attention layer with a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from b12x_core.adapters import AttentionCase
from b12x_core.testing import bounds

from b12x_conformance.cases import generator
from b12x_conformance.oracle.attention import Attended, attention, stored

STALE = 30.0
"""What fills the pool before a case writes its own tokens: as in a pool that served others, and visible if read."""

PADDING = 3
"""Tokens of STALE in every write whose slot is -1: an engine pads its steps, and nothing of them may be stored."""

KV_DTYPES = ("auto", "fp8_e4m3")
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Requests of one step.

    Attributes:
        lengths: for each request its number of keys, those of this step included; 0 is a padded row of the batch.
        queries: for each request its number of query tokens.
        padded_rows: rows of q after those of the last request.
        extra_columns: columns of the block table beyond what the longest request needs.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    padded_rows: int = 0
    extra_columns: int = 0


def decode(*lengths: int, queries: int = 1, **options: int) -> Batch:
    """Requests with the same number of query tokens."""
    return Batch(lengths, (queries,) * len(lengths), **options)


@dataclass(frozen=True)
class AttentionProblem:
    """An attention layer, steps to run through it, and what must come out.

    Attributes:
        id: of the test.
        num_heads, num_kv_heads, head_dim, v_head_dim, page_size, scale, window, soft_cap, kv_dtype, k_scale, v_scale,
            dtype: as in `AttentionCase`.
        batches: steps, one after the other through the same layer; each has requests, pages and a block table of its
            own, in the same tensors as far as their shapes allow.
        sinks: logits of the sinks by head.
        tokens: makes q, k, v for a batch.
        num_pages: pages of the pool, None for what the batches need. Page 0 and the last one are always used.
        exact: the output must be equal to the rounded truth; otherwise within the bound.
    """

    id: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batches: tuple[Batch, ...]
    page_size: int = 16
    v_head_dim: int | None = None
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: Callable[[int], torch.Tensor] | None = None
    kv_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    tokens: Callable[[AttentionProblem, Batch, torch.Generator], Tokens] = field(default_factory=lambda: random_tokens)
    num_pages: int | None = None
    exact: bool = False

    @property
    def pages(self) -> int:
        """Pages of the pool: some are never given to a request."""
        most = max(sum(-(-length // self.page_size) for length in batch.lengths) for batch in self.batches)
        return self.num_pages or most + 3

    @property
    def v_size(self) -> int:
        """Size of a value."""
        return self.v_head_dim or self.head_dim

    def case(self, device: str) -> AttentionCase:
        """The layer."""
        return AttentionCase(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            page_size=self.page_size,
            num_pages=self.pages,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks(self.num_heads).to(device),
            kv_dtype=self.kv_dtype,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            dtype=self.dtype,
            device=device,
        )

    def steps(self) -> Iterator[Step]:
        """The tensors of every batch in turn."""
        rng = generator(self.id)
        for batch in self.batches:
            yield Step.make(self, batch, rng)

    @property
    def kv_name(self) -> str:
        """The dtype in which the cache stores, as `b12x_core.counters` has it."""
        return "float8_e4m3fn" if self.kv_dtype == "fp8_e4m3" else str(self.dtype).removeprefix("torch.")

    def bound(self) -> bounds.Bound:
        """How far the output may be from the truth."""
        return bounds.bound("attention", self.dtype)


@dataclass(frozen=True)
class Step:
    """A `Batch` with its tensors.

    Attributes:
        problem, batch: where it comes from.
        q: (T, H, D).
        k, v: (sum of lengths + PADDING, Hkv, D or Dv), and slots (the same,) int64: what to write before.
        block_table, seq_lens, query_start_loc: as `AttentionLayer.run` takes them.
    """

    problem: AttentionProblem
    batch: Batch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor

    @staticmethod
    def make(problem: AttentionProblem, batch: Batch, rng: torch.Generator) -> Step:
        """Draw tokens, and give each request pages at random: page 0 and the last one first."""
        size = problem.page_size
        middle = 1 + torch.randperm(min(problem.pages - 2, 4096), generator=rng)
        free = [0, problem.pages - 1, *middle.tolist()]
        counts = [-(-length // size) for length in batch.lengths]
        columns = max(*counts, 1) + batch.extra_columns
        # Entries that no request needs name a page that nobody wrote in this step.
        table = torch.full((len(counts), columns), free[sum(counts)], dtype=torch.int32)
        slots = []
        for row, (count, length) in enumerate(zip(counts, batch.lengths, strict=True)):
            pages, free = free[:count], free[count:]
            table[row, :count] = torch.tensor(pages, dtype=torch.int32)
            position = torch.arange(length)
            slots.append(table[row].long()[position // size] * size + position % size)
        slots.append(torch.full((PADDING,), -1))
        q, k, v = problem.tokens(problem, batch, rng)
        k, v = (torch.cat([tokens, tokens.new_full((PADDING, *tokens.shape[1:]), STALE)]) for tokens in (k, v))
        starts = torch.tensor([0, *batch.queries]).cumsum(0)
        lengths = torch.tensor(batch.lengths, dtype=torch.int32)
        return Step(problem, batch, q, k, v, torch.cat(slots), table, lengths, starts.int())

    def expected(self) -> Attended:
        """The truth in float64."""
        problem = self.problem
        return attention(
            self.q,
            stored(self.k[:-PADDING], problem.kv_dtype, problem.k_scale).split(self.batch.lengths),
            stored(self.v[:-PADDING], problem.kv_dtype, problem.v_scale).split(self.batch.lengths),
            self.batch.queries,
            scale=problem.scale,
            window=problem.window,
            soft_cap=problem.soft_cap,
            sinks=None if problem.sinks is None else problem.sinks(problem.num_heads),
        )


def random_tokens(problem: AttentionProblem, batch: Batch, rng: torch.Generator) -> Tokens:
    """Normal q, k, v; scores of an rms near 2, so that a softmax is neither flat nor a single key."""
    written, rows = sum(batch.lengths), sum(batch.queries) + batch.padded_rows
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    gain = (2 / (scale * problem.head_dim**0.5)) ** 0.5
    q = torch.randn(rows, problem.num_heads, problem.head_dim, generator=rng) * gain
    k = torch.randn(written, problem.num_kv_heads, problem.head_dim, generator=rng) * gain
    v = torch.randn(written, problem.num_kv_heads, problem.v_size, generator=rng)
    return q.to(problem.dtype), k.to(problem.dtype), v.to(problem.dtype)


def positions(problem: AttentionProblem, batch: Batch, rng: torch.Generator) -> Tokens:
    """Queries of 0 give every visible key the same weight; v is one-hot in the position of its key, modulo its size."""
    q, k, v = random_tokens(problem, batch, rng)
    position = torch.cat([torch.arange(length) for length in batch.lengths])
    one_hot = torch.eye(problem.v_size)[position % problem.v_size]
    return torch.zeros_like(q), k, one_hot[:, None, :].expand_as(v).to(v.dtype).contiguous()


def mild_sinks(heads: int) -> torch.Tensor:
    """A logit from -2 to 3 for each head."""
    return torch.linspace(-2, 3, heads)


def strong_sinks(heads: int) -> torch.Tensor:
    """+10 on every other head, which then gives almost nothing; -10 on the rest, which does not notice."""
    return torch.where(torch.arange(heads) % 2 == 0, 10.0, -10.0)


# Problems

MODELS: dict[str, dict[str, object]] = {
    "gpt-oss-64-8-d64": {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "window": 128, "sinks": mild_sinks},
    "minimax-48-8-d128": {"num_heads": 48, "num_kv_heads": 8, "head_dim": 128},
    "qwen3-32-4-d128": {"num_heads": 32, "num_kv_heads": 4, "head_dim": 128},
    "qwen35-16-2-d256": {"num_heads": 16, "num_kv_heads": 2, "head_dim": 256},
    "qwen35-32-2-d256": {"num_heads": 32, "num_kv_heads": 2, "head_dim": 256},
    "qwen36-24-4-d256": {"num_heads": 24, "num_kv_heads": 4, "head_dim": 256},
    "gemma-32-16-d256": {"num_heads": 32, "num_kv_heads": 16, "head_dim": 256, "scale": 1.0, "window": 100},
    "mimo-64-4-d192-v128": {
        "num_heads": 64, "num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128, "window": 128, "sinks": mild_sinks,
    },
    "smollm2-9-3-d64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "step-64-8-d128": {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128},
    "one-head-d96": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 96},
}  # fmt: skip
"""Head counts, sizes and masks of real models, and one without any grouping."""

_STEPS = (
    decode(1, 15, 16, 17, 200),
    Batch((5, 33, 150, 64), (5, 33, 20, 1)),
    decode(4, 70, 129, queries=4),
)
"""A decode step, a step of prefills, chunks and a decode, and a verification step."""

_KV_SCALES = {"auto": {}, "fp8_e4m3": {"k_scale": 0.037, "v_scale": 0.0105}}


def _grid() -> Iterator[AttentionProblem]:
    for name, model in MODELS.items():
        for page_size in (16, 64, 128):
            for kv_dtype in KV_DTYPES:
                yield AttentionProblem(
                    f"{name}-page-{page_size}-{kv_dtype}", batches=_STEPS, page_size=page_size, kv_dtype=kv_dtype,
                    **_KV_SCALES[kv_dtype], **model,  # type: ignore[arg-type]
                )  # fmt: skip
    for name in ("smollm2-9-3-d64", "qwen3-32-4-d128"):
        yield AttentionProblem(f"{name}-fp16", batches=_STEPS, dtype=torch.float16, **MODELS[name])  # type: ignore[arg-type]


def _kinds() -> Iterator[AttentionProblem]:
    # More than 2**31 elements of keys, and as many of values: element offsets in the last page overflow int32.
    pages = 2**31 // (16 * 8 * 128) + 1
    yield AttentionProblem(
        "kind-23-pool-beyond-2-31-elements", 8, 8, 128, (Batch((16, 16, 20), (1, 4, 20)),), num_pages=pages,
        kv_dtype="fp8_e4m3",
    )  # fmt: skip
    yield AttentionProblem(
        "kind-24-block-table-width-changes", 8, 2, 64,
        (decode(20, 100, extra_columns=1), decode(7, 33), decode(40, 90, extra_columns=20)),
    )  # fmt: skip
    for kv_dtype in KV_DTYPES:
        yield AttentionProblem(
            f"kind-25-verification-with-other-pages-{kv_dtype}", 8, 2, 64,
            (decode(70, 33, 90, queries=4), decode(70, 33, 90, queries=4), decode(71, 37, 91, queries=4)),
            kv_dtype=kv_dtype,
        )  # fmt: skip
    for name, batch in {
        "decode": decode(17, 40, 5, 0),
        "verification": decode(17, 40, 5, 0, queries=4, padded_rows=3),
        "all-padding": decode(0, 0),
        "no-queries": Batch((17, 40, 5, 0), (1, 1, 1, 0), padded_rows=5),
    }.items():
        for sinks in (None, mild_sinks):
            yield AttentionProblem(
                f"kind-26-padded-rows-{name}{'-sinks' if sinks else ''}", 8, 2, 64, (batch,), sinks=sinks
            )
    yield AttentionProblem("kind-27-kv-scales", 8, 2, 128, _STEPS, kv_dtype="fp8_e4m3", k_scale=0.25, v_scale=0.5)
    for page_size in (16, 64):
        for length in (1024, 1025, 1088):
            for kv_dtype in KV_DTYPES:
                yield AttentionProblem(
                    f"kind-28-past-the-window-page-{page_size}-length-{length}-{kv_dtype}", 8, 2, 256,
                    (decode(length, 1040, queries=8),), page_size=page_size, window=1024, kv_dtype=kv_dtype,
                )  # fmt: skip
    for page_size in (16, 64):
        for name, batch in {
            "decode": decode(1, 127, 128, 129, 250),
            "prefill": Batch((130, 250), (130, 130)),
        }.items():
            yield AttentionProblem(
                f"kind-29-window-exact-{name}-page-{page_size}", 4, 2, 256, (batch,), page_size=page_size, window=128,
                tokens=positions, exact=True,
            )  # fmt: skip
    for name, batch in {"decode": decode(1, 15, 16, 17), "prefill": Batch((1, 15, 16, 17), (1, 15, 16, 17))}.items():
        yield AttentionProblem(f"kind-30-sinks-{name}", 16, 2, 64, (batch,), sinks=strong_sinks)
        yield AttentionProblem(f"kind-30-sinks-window-{name}", 16, 2, 64, (batch,), sinks=strong_sinks, window=8)
    for kv_dtype in KV_DTYPES:
        prefixes, queries = (0, 1, 63, 64, 4095), (0, 1, 17, 64, 129)
        lengths = tuple(prefix + count for prefix, count in zip(prefixes, queries, strict=True))
        yield AttentionProblem(
            f"kind-31-mixed-extend-{kv_dtype}", 8, 2, 128, (Batch(lengths, queries),), page_size=64, kv_dtype=kv_dtype
        )
        lengths = tuple(prefix + count for prefix, count in zip(prefixes[:4], queries[:0:-1], strict=True))
        yield AttentionProblem(
            f"kind-31-mixed-extend-window-{kv_dtype}", 8, 2, 128, (Batch(lengths, queries[:0:-1]),), window=50,
            kv_dtype=kv_dtype,
        )  # fmt: skip
    for scale in (1.0, 0.01, 0.2):
        yield AttentionProblem(f"kind-32-softmax-scale-{scale}", 8, 2, 128, _STEPS, scale=scale)
    for cap in (5.0, 30.0, 50.0):
        yield AttentionProblem(f"kind-32-soft-cap-{cap:g}", 8, 2, 128, _STEPS, soft_cap=cap)
    yield AttentionProblem("kind-32-soft-cap-window-sinks", 8, 2, 64, _STEPS, soft_cap=5.0, window=20, sinks=mild_sinks)
    for kv_dtype in KV_DTYPES:
        yield AttentionProblem(f"kind-32-d192-v128-{kv_dtype}", 16, 2, 192, _STEPS, v_head_dim=128, kv_dtype=kv_dtype)


PROBLEMS: tuple[AttentionProblem, ...] = (*_kinds(), *_grid())
