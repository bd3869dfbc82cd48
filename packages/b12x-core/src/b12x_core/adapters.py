"""What an engine adapter offers to the rest of the project: pluggy hook specifications, and discovery.

An adapter is an installed distribution with an entry point in the group `b12x.adapters` whose object implements the
hooks of `AdapterSpec` with `hookimpl`. The conformance suite and `b12x doctor` reach an engine only through them, so
that a further engine is a further distribution and no change anywhere else.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pluggy
import torch

from b12x_core.activations import SILU, Activation
from b12x_core.errors import UnsupportedError

GROUP = "b12x.adapters"
QKV = ("q_proj", "k_proj", "v_proj")
FUSED_NAMES: Mapping[tuple[str, ...], str] = {QKV: "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
"""Names that models of engines give to fused layers, which the ignore lists of checkpoints are matched against."""

hookspec = pluggy.HookspecMarker("b12x")
hookimpl = pluggy.HookimplMarker("b12x")


@dataclass(frozen=True)
class AdapterInfo:
    """Who an adapter is.

    Attributes:
        name: short name, the id of its conformance tests ("vllm").
        engine: the engine's own name ("vLLM").
        serves: version specifier (PEP 440) of the engine versions that it was proven with.
        installed: the engine's installed version, None where it is not installed.
    """

    name: str
    engine: str
    serves: str
    installed: str | None


@dataclass(frozen=True)
class LinearCase:
    """A linear layer as a checkpoint stores it, to be built by the engine's own layer and weight loader.

    Attributes:
        shards: (projection name, rows N) of each projection. One: a plain layer. Several: the engine's fused layer
            (q_proj, k_proj, v_proj; gate_proj, up_proj).
        k: columns of every projection.
        tensors: checkpoint tensors named "<projection>.<tensor>" ("q_proj.weight_scale").
        quantization: `quantization_config` of the checkpoint's config.json, None for an unquantized one.
        dtype: torch.bfloat16 or torch.float16, of activations and result.
        device: where the layer runs.
        head_size: for a fused q, k, v layer, rows of one head.
    """

    shards: tuple[tuple[str, int], ...]
    k: int
    tensors: Mapping[str, torch.Tensor]
    quantization: Mapping[str, Any] | None
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    head_size: int | None = None

    @property
    def fused_name(self) -> str:
        """What an engine calls the layer: the projection's own name for one; qkv_proj, gate_up_proj or fused_proj."""
        names = tuple(name for name, _ in self.shards)
        return names[0] if len(names) == 1 else FUSED_NAMES.get(names, "fused_proj")

    @property
    def is_qkv(self) -> bool:
        """Whether an engine's layer for q, k and v of attention can hold the projections."""
        names, rows = zip(*self.shards, strict=True)
        return names == QKV and self.head_size is not None and rows[1] == rows[2]


@dataclass(frozen=True)
class MoECase:
    """A mixture-of-experts layer as a checkpoint stores it.

    Attributes:
        tensors: checkpoint tensors, either "<expert>.<projection>.<tensor>" ("3.gate_proj.weight_packed"; up_proj and
            down_proj alone where the activation is not gated) or, for gpt-oss, the fused "gate_up_proj_blocks",
            "gate_up_proj_scales", "gate_up_proj_bias", "down_proj_blocks", "down_proj_scales", "down_proj_bias".
        num_experts: number of experts of the whole layer (global).
        top_k: experts a token.
        hidden, intermediate: H and I.
        activation: between the two GEMMs.
        quantization, dtype, device: as in `LinearCase`.
        router_weight_on_input: the routed weight multiplies the input of the expert instead of its output.
        ep_rank, ep_size: this rank's share of the experts: a contiguous block of num_experts / ep_size.
    """

    tensors: Mapping[str, torch.Tensor]
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    quantization: Mapping[str, Any] | None
    activation: Activation = SILU
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    router_weight_on_input: bool = False
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def is_gpt_oss(self) -> bool:
        """Whether the tensors are gpt-oss's, which hold all experts at once."""
        return "gate_up_proj_blocks" in self.tensors


@dataclass(frozen=True)
class AttentionCase:
    """A causal self-attention layer with its KV cache.

    Attributes:
        num_heads, num_kv_heads, head_dim, v_head_dim: head counts and sizes; v_head_dim None means head_dim.
        page_size: tokens a page. num_pages: pages of the pool.
        scale: softmax scale, None for head_dim ** -0.5.
        window: number of visible keys including the query's own, None for all.
        soft_cap: cap * tanh(score / cap), None for none.
        sinks: (num_heads,) float32 logits that join each softmax, or None.
        kv_dtype: "auto" (the activation dtype) or "fp8_e4m3".
        k_scale, v_scale: what a stored FP8 key or value is multiplied with.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    v_head_dim: int | None = None
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    kv_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"


Case = LinearCase | MoECase | AttentionCase


@runtime_checkable
class LinearLayer(Protocol):
    """An engine's linear layer, loaded: x (M, K) -> (M, sum of N)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer's own forward."""
        ...


@runtime_checkable
class MoELayer(Protocol):
    """An engine's MoE layer, loaded, with the routing given: topk_ids are global ids, -1 marks no expert."""

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """X (M, H), topk_weights (M, top_k) float32, topk_ids (M, top_k) -> (M, H)."""
        ...


@runtime_checkable
class AttentionLayer(Protocol):
    """An engine's attention layer with its KV cache allocated in the engine's own layout."""

    def write(self, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store k (T, Hkv, D) and v (T, Hkv, Dv) at slots (T,) int64 = page * page_size + offset; -1 is skipped."""
        ...

    def run(
        self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """Attend q (T, H, D) to the stored keys; shapes as in `b12x_core.paged_attention`. Returns (T, H, Dv)."""
        ...


@dataclass(frozen=True)
class Generation:
    """Greedy continuation of one prompt.

    Attributes:
        token_ids: the tokens generated.
        top_logprobs: for each of them, log-probability of the likeliest candidates by token id.
    """

    token_ids: tuple[int, ...]
    top_logprobs: tuple[Mapping[int, float], ...]


class TextEngine(Protocol):
    """A model loaded by the engine."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generation]:
        """Continue all prompts in one batch, greedily, ignoring the end-of-sequence token."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, given those before it."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


@dataclass(frozen=True)
class TextEngineOptions:
    """How a model is served.

    Attributes:
        dtype: activation dtype.
        max_model_len: longest sequence in tokens.
        kv_dtype: as in `AttentionCase`.
        device: "cpu" or "cuda".
        speculative_tokens: tokens proposed a step by prompt look-up (n-gram) and verified; 0 for none.
        max_num_batched_tokens: tokens a step; a longer prompt is prefilled in chunks. None for the engine's choice.
    """

    dtype: torch.dtype = torch.bfloat16
    max_model_len: int = 4096
    kv_dtype: str = "auto"
    device: str = "cpu"
    speculative_tokens: int = 0
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True)
class ServerCommand:
    """How to start the engine's OpenAI-compatible server.

    Attributes:
        argv: command line.
        environment: variables to set beside those of the parent process.
        health: path that answers 200 once the server is ready.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"


class AdapterSpec:
    """The hooks of an adapter. All but `b12x_adapter_info` may be left out; what is left out is reported as such."""

    @hookspec(firstresult=True)
    def b12x_adapter_info(self) -> AdapterInfo | None:
        """Who this adapter is. Must not import the engine."""

    @hookspec(firstresult=True)
    def b12x_cannot_express(self, case: Case | TextEngineOptions, checkpoint: str | None) -> str | None:
        """Why the engine's own interfaces cannot express a case (one sentence), None if they can.

        `checkpoint` is the folder of the model that is to be served with `TextEngineOptions`, None for a layer. An
        implementation whose engine reads every checkpoint leaves the argument out.
        """

    @hookspec(firstresult=True)
    def b12x_linear_layer(self, case: LinearCase) -> LinearLayer | None:
        """Build the engine's own linear layer through its own loader, served by `b12x_core.linear`."""

    @hookspec(firstresult=True)
    def b12x_moe_layer(self, case: MoECase) -> MoELayer | None:
        """Build the engine's own MoE layer through its own loader, served by `b12x_core.fused_moe`."""

    @hookspec(firstresult=True)
    def b12x_attention_layer(self, case: AttentionCase) -> AttentionLayer | None:
        """Build the engine's own attention layer, served by `b12x_core.paged_attention`."""

    @hookspec(firstresult=True)
    def b12x_text_engine(self, checkpoint: str, options: TextEngineOptions) -> TextEngine | None:
        """Load a checkpoint folder into the engine with every b12x flag set."""

    @hookspec(firstresult=True)
    def b12x_server_command(self, checkpoint: str, port: int, options: TextEngineOptions) -> ServerCommand | None:
        """The command that serves a checkpoint folder on 127.0.0.1:port with every b12x flag set."""


class Adapter:
    """One adapter found: its hooks as methods.

    Args:
        name: entry point name.
        plugin: the entry point's object.
    """

    def __init__(self, name: str, plugin: object) -> None:
        self._manager = pluggy.PluginManager("b12x")
        self._manager.add_hookspecs(AdapterSpec)
        self._manager.register(plugin, name=name)
        self._manager.check_pending()
        info = self._manager.hook.b12x_adapter_info()
        if not isinstance(info, AdapterInfo):
            raise TypeError(f"adapter {name!r}: hook b12x_adapter_info must return AdapterInfo; got {info!r}")
        self.info: AdapterInfo = info

    @property
    def name(self) -> str:
        """Short name of the adapter."""
        return self.info.name

    def implements(self, hook: str) -> bool:
        """Whether the adapter implements a hook of `AdapterSpec`."""
        caller: Any = getattr(self._manager.hook, hook)
        return bool(caller.get_hookimpls())

    def cannot_express(self, case: Case | TextEngineOptions, checkpoint: str | None = None) -> str | None:
        """The adapter's reason why its engine cannot express the case, None if it can."""
        reason: str | None = self._manager.hook.b12x_cannot_express(case=case, checkpoint=checkpoint)
        return reason

    def linear_layer(self, case: LinearCase) -> LinearLayer:
        """See `AdapterSpec.b12x_linear_layer`. Raises UnsupportedError if the adapter lacks the hook."""
        layer: LinearLayer = self._call("b12x_linear_layer", case=case)
        return layer

    def moe_layer(self, case: MoECase) -> MoELayer:
        """See `AdapterSpec.b12x_moe_layer`. Raises UnsupportedError if the adapter lacks the hook."""
        layer: MoELayer = self._call("b12x_moe_layer", case=case)
        return layer

    def attention_layer(self, case: AttentionCase) -> AttentionLayer:
        """See `AdapterSpec.b12x_attention_layer`. Raises UnsupportedError if the adapter lacks the hook."""
        layer: AttentionLayer = self._call("b12x_attention_layer", case=case)
        return layer

    def text_engine(self, checkpoint: str, options: TextEngineOptions) -> TextEngine:
        """See `AdapterSpec.b12x_text_engine`. Raises UnsupportedError if the adapter lacks the hook."""
        engine: TextEngine = self._call("b12x_text_engine", checkpoint=checkpoint, options=options)
        return engine

    def server_command(self, checkpoint: str, port: int, options: TextEngineOptions) -> ServerCommand:
        """See `AdapterSpec.b12x_server_command`. Raises UnsupportedError if the adapter lacks the hook."""
        command: ServerCommand = self._call("b12x_server_command", checkpoint=checkpoint, port=port, options=options)
        return command

    def _call(self, hook: str, **arguments: Any) -> Any:
        caller: Callable[..., Any] = getattr(self._manager.hook, hook)
        result = caller(**arguments)
        if result is None:
            raise UnsupportedError(f"adapter {self.name}: does not implement {hook}")
        return result


def discover(names: Sequence[str] | None = None) -> dict[str, Adapter]:
    """The installed adapters by name, sorted, restricted to `names` if given.

    Raises:
        LookupError: a name that no installed distribution offers.
    """
    found = {}
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        if names is None or point.name in names:
            found[point.name] = Adapter(point.name, point.load())
    missing = sorted(set(names or ()) - set(found))
    if missing:
        raise LookupError(
            f"no installed distribution offers the adapter {', '.join(missing)} (entry point group {GROUP}); "
            f"found: {', '.join(found) or 'none'}"
        )
    return found
