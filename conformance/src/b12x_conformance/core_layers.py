"""From the tensors of a checkpoint to prepared weights of `b12x_core`, and layers made of its ops alone.

One loader for the layers and for the text engine of the adapter `core`. It does what an engine's loader does, with
nothing between the checkpoint and the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import b12x_core
import torch
from b12x_core import formats
from b12x_core.adapters import AttentionCase, LinearCase, MoECase
from b12x_core.ops.linear import LinearWeights
from b12x_core.ops.moe import ExpertWeights

from b12x_conformance.checkpoints import packings
from b12x_conformance.checkpoints.packings import StoredLinear

KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

Tensors = Mapping[str, torch.Tensor]


def prepare_linear(parts: Sequence[StoredLinear], dtype: torch.dtype) -> LinearWeights:
    """Prepared weights of stored projections of one input, in the scheme to serve them with."""
    whole = _one_below_the_other(parts, dtype)
    return b12x_core.prepare_projections(
        whole.scheme,
        [part.rows for part in parts],
        whole.weight,
        whole.scale,
        global_scale=whole.global_scale,
        input_scale=whole.input_scale,
        bias=whole.bias,
    )


def _one_below_the_other(parts: Sequence[StoredLinear], dtype: torch.dtype) -> StoredLinear:
    """Projections of one input as one matrix. Scales are put end to end, so there may be one for each projection."""
    scheme, weight = parts[0].scheme, torch.cat([part.weight for part in parts])
    if not scheme.weight.quantized:
        scheme, weight = formats.SCHEMES["fp16" if dtype == torch.float16 else "bf16"], weight.to(dtype)
    return StoredLinear(
        scheme,
        weight,
        _cat([part.scale for part in parts]),
        _cat([part.global_scale for part in parts]),
        _cat([part.input_scale for part in parts]),
        _cat([part.bias for part in parts]),
    )


@dataclass(frozen=True)
class StoredExperts:
    """The experts of one layer as stored: a list by expert of each projection.

    Attributes:
        gate: None where the activation is not gated.
        up, down: as stored.
    """

    gate: list[StoredLinear] | None
    up: list[StoredLinear]
    down: list[StoredLinear]


def read_experts(
    packing: packings.Packing, tensors: Tensors, name: Callable[[int, str], str], experts: Sequence[int]
) -> StoredExperts:
    """Read experts stored one by one.

    Args:
        packing: how the checkpoint stores a projection.
        tensors: by name.
        name: (expert, "gate" or "up" or "down") -> the projection's prefix among the tensors.
        experts: which to read.
    """
    gated = any(f"{name(experts[0], 'gate')}.{tensor}" in tensors for tensor in ("weight", packing.weight))
    projections = {
        which: [packing.read(tensors, name(expert, which)) for expert in experts]
        for which in (("gate", "up", "down") if gated else ("up", "down"))
    }
    return StoredExperts(projections.get("gate"), projections["up"], projections["down"])


def prepare_experts(stored: StoredExperts, dtype: torch.dtype) -> ExpertWeights:
    """Prepared weights of a layer's experts, gate rows before up rows."""
    projections = [stored.up] if stored.gate is None else [stored.gate, stored.up]
    first = [_one_below_the_other(parts, dtype) for parts in zip(*projections, strict=True)]
    second = [_one_below_the_other([part], dtype) for part in stored.down]
    return b12x_core.prepare_expert_projections(
        first[0].scheme,
        torch.stack([part.weight for part in first]),
        _stack([part.scale for part in first]),
        torch.stack([part.weight for part in second]),
        _stack([part.scale for part in second]),
        w13_global_scale=_stack([part.global_scale for part in first]),
        w2_global_scale=_stack([part.global_scale for part in stored.down]),
        w13_input_scale=_stack([part.input_scale for part in first]),
        w2_input_scale=_stack([part.input_scale for part in stored.down]),
        w13_bias=_stack([part.bias for part in first]),
        w2_bias=_stack([part.bias for part in second]),
    )


def prepare_gpt_oss_experts(tensors: Tensors, prefix: str, experts: slice = slice(None)) -> ExpertWeights:
    """Prepared weights of gpt-oss experts: fused over experts, MXFP4, gate and up rows in turn, with bias."""

    def stored(name: str) -> torch.Tensor:
        return tensors[f"{prefix}{name}"][experts]

    return b12x_core.prepare_experts(
        formats.SCHEMES["mxfp4-w4a16"],
        stored("gate_up_proj_blocks").flatten(-2),
        stored("gate_up_proj_scales"),
        stored("down_proj_blocks").flatten(-2),
        stored("down_proj_scales"),
        w13_bias=stored("gate_up_proj_bias"),
        w2_bias=stored("down_proj_bias"),
        gate_up="interleaved",
    )


class CoreLinear:
    """A linear layer of one or several projections: x (M, K) -> (M, sum of N)."""

    def __init__(self, case: LinearCase) -> None:
        packing = packings.parse(case.quantization)
        tensors = _on_device(case)
        parts = [packing.read(tensors, name) for name, _ in case.shards]
        # Blocks of rows that a projection does not fill cannot be followed by those of another one.
        together = parts[0].scheme.weight != formats.FP8_BLOCK
        groups = [parts] if together else [[part] for part in parts]
        self._parts = [prepare_linear(group, case.dtype) for group in groups]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `b12x_core.adapters.LinearLayer`."""
        return torch.cat([b12x_core.linear(x, part) for part in self._parts], dim=-1)


class CoreMoE:
    """This rank's experts, with the routing given: topk_ids are global, -1 marks no expert."""

    def __init__(self, case: MoECase) -> None:
        local = case.num_experts // case.ep_size
        first = case.ep_rank * local
        self._case = case
        tensors = _on_device(case)
        if "gate_up_proj_blocks" in tensors:
            self._experts = prepare_gpt_oss_experts(tensors, "", slice(first, first + local))
        else:
            packing = packings.parse(case.quantization)
            stored = read_experts(
                packing, tensors, lambda expert, which: f"{expert}.{which}_proj", range(first, first + local)
            )
            self._experts = prepare_experts(stored, case.dtype)
        self._map: torch.Tensor | None = None
        if case.ep_size > 1:
            self._map = torch.full((case.num_experts,), -1, dtype=torch.int32, device=case.device)
            self._map[first : first + local] = torch.arange(local, dtype=torch.int32, device=case.device)

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """See `b12x_core.adapters.MoELayer`."""
        return b12x_core.fused_moe(
            x,
            self._experts,
            topk_weights,
            topk_ids,
            activation=self._case.activation,
            expert_map=self._map,
            router_weight_on_input=self._case.router_weight_on_input,
        )


class CoreAttention:
    """Attention over a paged cache of its own."""

    def __init__(self, case: AttentionCase) -> None:
        dtype = KV_DTYPES.get(case.kv_dtype, case.dtype)
        shape = (case.num_pages, case.page_size, case.num_kv_heads)
        self._case = case
        # Not zeroed: only the pages that are written need to exist, and a case may have gigabytes of them.
        self._k = torch.empty(*shape, case.head_dim, dtype=dtype, device=case.device)
        self._v = torch.empty(*shape, case.v_head_dim or case.head_dim, dtype=dtype, device=case.device)
        self._sinks = None if case.sinks is None else case.sinks.to(case.device)
        self._scales: dict[str, Any] = {
            "k_scale": torch.tensor(case.k_scale, device=case.device),
            "v_scale": torch.tensor(case.v_scale, device=case.device),
        }

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See `b12x_core.adapters.AttentionLayer`."""
        b12x_core.write_kv_cache(k, v, self._k, self._v, slot_mapping, **self._scales)

    def run(
        self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """See `b12x_core.adapters.AttentionLayer`."""
        out: torch.Tensor = b12x_core.paged_attention(
            q,
            self._k,
            self._v,
            block_table,
            seq_lens,
            query_start_loc,
            scale=self._case.scale,
            window=self._case.window,
            soft_cap=self._case.soft_cap,
            sinks=self._sinks,
            **self._scales,
        )
        return out


def _on_device(case: LinearCase | MoECase) -> dict[str, torch.Tensor]:
    """The tensors of a case where its layer runs; a checkpoint is read on the CPU."""
    return {name: tensor.to(case.device) for name, tensor in case.tensors.items()}


def _cat(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [value for value in values if value is not None]
    return torch.cat([torch.atleast_1d(value) for value in present]) if present else None


def _stack(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [value for value in values if value is not None]
    return torch.stack(present) if present else None
