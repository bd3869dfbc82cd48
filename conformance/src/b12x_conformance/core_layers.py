"""From the tensors of a checkpoint to prepared weights of `b12x_core`, and layers made of its ops alone.

One loader for the layers and for the text engine of the adapter `core`. It does what an engine's loader does, with
nothing between the checkpoint and the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import b12x_core
import torch
from b12x_core import formats
from b12x_core.adapters import AttentionCase, LinearCase, MoECase
from b12x_core.formats import Scheme
from b12x_core.ops.linear import LinearWeights
from b12x_core.ops.moe import ExpertWeights

from b12x_conformance.checkpoints import packings
from b12x_conformance.checkpoints.packings import StoredLinear

KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

Tensors = Mapping[str, torch.Tensor]


def prepare_linear(stored: StoredLinear, dtype: torch.dtype) -> LinearWeights:
    """Prepared weights of one stored projection, in the scheme to serve it with."""
    scheme = b12x_core.serving_scheme(stored.scheme)
    if not scheme.weight.quantized:
        scheme = formats.SCHEMES["fp16" if dtype == torch.float16 else "bf16"]
    return b12x_core.prepare_linear(
        scheme,
        stored.weight if scheme.weight.quantized else stored.weight.to(dtype),
        stored.scale,
        global_scale=stored.global_scale,
        input_scale=_served_input_scale(scheme, stored.input_scale),
        bias=stored.bias,
    )


def fuse(parts: Sequence[StoredLinear]) -> list[StoredLinear]:
    """Projections of one input as one matrix, where their scales can be put side by side; else as they are.

    A scale for each row, or each run of K in a row, is simply stacked, and a global scale for each matrix becomes one
    for each row. A scale for the whole of an FP8 matrix, or for blocks of rows that a projection does not fill, cannot.
    """
    first = parts[0]
    stackable = first.scheme.weight not in (formats.FP8_TENSOR, formats.FP8_BLOCK)
    same = all(part.scheme == first.scheme and (part.bias is None) == (first.bias is None) for part in parts)
    if len(parts) == 1 or not stackable or not same or not _equal([part.input_scale for part in parts]):
        return list(parts)
    return [
        StoredLinear(
            first.scheme,
            torch.cat([part.weight for part in parts]),
            _cat([None if part.scale is None else part.scale.reshape(part.rows, -1) for part in parts]),
            _cat([None if part.global_scale is None else part.global_scale.expand(part.rows) for part in parts]),
            first.input_scale,
            _cat([part.bias for part in parts]),
        )
    ]


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
    scheme = b12x_core.serving_scheme(stored.up[0].scheme)
    if not scheme.weight.quantized:
        scheme = formats.SCHEMES["fp16" if dtype == torch.float16 else "bf16"]
    gate, up, down = stored.gate, stored.up, stored.down
    if scheme.weight == formats.FP8_TENSOR and gate is not None and not _all_equal_scales(gate, up):
        # One matrix of an expert has one scale; two scales are kept exactly as a scale for each row.
        scheme = Scheme(formats.FP8_ROW, scheme.activation)
        gate, up, down = ([_by_row(part) for part in parts] for parts in (gate, up, down))
    first = up if gate is None else [_gate_over_up(*pair) for pair in zip(gate, up, strict=True)]
    weights = [torch.stack([part.weight for part in parts]) for parts in (first, down)]
    w13, w2 = weights if scheme.weight.quantized else [weight.to(dtype) for weight in weights]
    return b12x_core.prepare_experts(
        scheme,
        w13,
        _stack([part.scale for part in first]),
        w2,
        _stack([part.scale for part in down]),
        w13_global_scale=_stack([part.global_scale for part in first]),
        w2_global_scale=_stack([part.global_scale for part in down]),
        w13_input_scale=_served_input_scale(scheme, _stack([part.input_scale for part in first])),
        w2_input_scale=_served_input_scale(scheme, _stack([part.input_scale for part in down])),
        w13_bias=_stack([part.bias for part in first]),
        w2_bias=_stack([part.bias for part in down]),
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
        self._parts = [prepare_linear(part, case.dtype) for part in fuse(parts)]

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


def _served_input_scale(scheme: Scheme, input_scale: torch.Tensor | None) -> torch.Tensor | None:
    """A checkpoint's input scale, unless the scheme served leaves activations in 16 bits."""
    return None if scheme.static_activation_scale is False else input_scale


def _gate_over_up(gate: StoredLinear, up: StoredLinear) -> StoredLinear:
    """Gate and up of one expert as one matrix, gate rows first."""
    if gate.input_scale is not None and up.input_scale is not None:
        # Both see the same input; the larger scale clips neither.
        shared = torch.maximum(gate.input_scale, up.input_scale)
        gate, up = replace(gate, input_scale=shared), replace(up, input_scale=shared)
    if gate.scheme.weight in (formats.FP8_TENSOR, formats.FP8_BLOCK):
        tensor = gate.scheme.weight == formats.FP8_TENSOR
        return replace(
            gate,
            weight=torch.cat([gate.weight, up.weight]),
            # One scale serves both; blocks of the up projection start anew below those of the gate.
            scale=gate.scale if tensor else _cat([gate.scale, up.scale]),
            bias=_cat([gate.bias, up.bias]),
        )
    return fuse([gate, up])[0]


def _all_equal_scales(gate: Sequence[StoredLinear], up: Sequence[StoredLinear]) -> bool:
    return all(_equal([one.scale, other.scale]) for one, other in zip(gate, up, strict=True))


def _by_row(part: StoredLinear) -> StoredLinear:
    """A matrix with one scale as one with that scale for each row."""
    assert part.scale is not None
    scheme = Scheme(formats.FP8_ROW, part.scheme.activation)
    return replace(part, scheme=scheme, scale=part.scale.reshape(1).expand(part.rows))


def _equal(values: Sequence[torch.Tensor | None]) -> bool:
    present = [value for value in values if value is not None]
    return not present or (len(present) == len(values) and all(torch.equal(value, present[0]) for value in present))


def _cat(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [value for value in values if value is not None]
    return torch.cat(present) if present else None


def _stack(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [value for value in values if value is not None]
    return torch.stack(present) if present else None
