"""`--moe-backend b12x`: what vLLM chooses, what it is refused with, and what its own layer then computes.

Layers are vLLM's own, built and loaded as a model's; what they should compute is written out in `moe_checkpoints`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import b12x_core
import moe_checkpoints as checkpoints
import pytest
import torch
from b12x_core import SCHEMES, Activation, SwiGLU, counters
from b12x_core.adapters import MoECase
from b12x_vllm.hooks import moe as hook
from b12x_vllm.hooks.context import layer_context
from b12x_vllm.moe import experts, oracles, register, schemes
from moe_checkpoints import GPT_OSS_SWIGLU, RECIPES, Sample, gpt_oss_sample, relative_error, routing, sample
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, nvfp4
from vllm.model_executor.layers.fused_moe.oracle import unquantized as plain
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.model_executor.model_loader import reload

register()

# Results are rounded once to the activation dtype; everything before is float32 on both sides. A value beside a
# rounding boundary of a quantized activation may fall to either side.
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _counters() -> Iterator[None]:
    counters.reset()
    yield
    counters.reset()


def check(made: Sample, *, tokens: int = 6, scheme: str | None = None) -> hook.Layer:
    """Build the layer, run it, compare; the op must have run once, in the given scheme or the recipe's."""
    layer = hook.build(made.case)
    x, weights, ids = routing(tokens, made.case)
    y = layer(x, weights, ids)
    assert list(counters.snapshot()) == [f"fused_moe/{scheme or made.recipe.scheme}"]
    assert relative_error(y, made.expected(x, weights, ids)) < BOUND[made.case.dtype]
    return layer


# ---- what the layers compute


@pytest.mark.parametrize("name", RECIPES)
def test_every_format(name: str) -> None:
    check(sample(RECIPES[name], equal_shards=RECIPES[name].scheme == "fp8-tensor"))


def test_gpt_oss() -> None:
    check(gpt_oss_sample())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["bf16", "modelopt-nvfp4", "ct-mxfp4-a16", "fp8-block", "modelopt-mxfp8", "gpt-oss"])
def test_expert_parallel(name: str, rank: int) -> None:
    options = {"num_experts": 6, "top_k": 3, "ep_rank": rank, "ep_size": 2}
    check(gpt_oss_sample(**options) if name == "gpt-oss" else sample(RECIPES[name], **options))


@pytest.mark.parametrize("name", ["bf16", "fp8-block"])
def test_biases_of_experts(name: str) -> None:
    check(sample(RECIPES[name], biases=True))


ACTIVATIONS = [
    b12x_core.GELU,
    b12x_core.GELU_TANH,
    b12x_core.RELU2,
    b12x_core.SILU_NOT_GATED,
    b12x_core.GELU_NOT_GATED,
    b12x_core.GELU_TANH_NOT_GATED,
    b12x_core.RELU2_NOT_GATED,
    GPT_OSS_SWIGLU,
    SwiGLU(1.5, 0.25, 0.5),
    Activation("silu", limit=0.5),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation: Activation) -> None:
    check(sample(RECIPES["ct-nvfp4-a16"], activation=activation))


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "fp8-static", "ct-mxfp4-a16", "modelopt-mxfp8", "ct-fp8-channel"])
def test_sizes_that_fit_no_tile(name: str) -> None:
    recipe = RECIPES[name]
    check(sample(recipe, hidden=96, intermediate=160, activation=b12x_core.RELU2_NOT_GATED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bf16", "modelopt-nvfp4"])
def test_router_weight_on_input(name: str, dtype: torch.dtype) -> None:
    made = sample(RECIPES[name], top_k=1, router_weight_on_input=True, dtype=dtype)
    check(made, scheme="fp16" if (name, dtype) == ("bf16", torch.float16) else None)


def test_no_tokens() -> None:
    made = sample(RECIPES["bf16"])
    x, weights, ids = routing(1, made.case)
    assert hook.build(made.case)(x[:0], weights[:0], ids[:0]).shape == (0, made.case.hidden)


# ---- scales that vLLM merges


@pytest.mark.parametrize("name", ["fp8-static", "fp8-dynamic", "modelopt-fp8"])
def test_fp8_projections_with_scales_of_their_own(name: str) -> None:
    """By itself, vLLM rounds the weights anew to the larger scale of gate and up, which costs 3 %."""
    check(sample(RECIPES[name]), scheme="fp8-channel-tensor")


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "ct-nvfp4"])
def test_nvfp4_global_scale_of_each_projection_stays(name: str) -> None:
    made = sample(RECIPES[name])
    weights = hook.build(made.case).layer.routed_experts.b12x_experts
    for expert in range(made.case.num_experts):
        for half, projection in enumerate(("gate_proj", "up_proj")):
            rows = weights.w13_global_scale[expert].chunk(2)[half]
            if name == "ct-nvfp4":
                stored = 1 / made.case.tensors[f"{expert}.{projection}.weight_global_scale"]
            else:
                stored = made.case.tensors[f"{expert}.{projection}.weight_scale_2"]
            assert torch.equal(rows, stored.expand_as(rows))


def test_fp8_input_scale_of_each_expert_stays() -> None:
    recipe = dataclasses.replace(
        RECIPES["fp8-static"], store=lambda w, i: checkpoints.store_fp8_tensor(w, 0.01 + 0.001 * (i // 3))
    )
    weights = hook.build(sample(recipe).case).layer.routed_experts.b12x_experts
    torch.testing.assert_close(weights.w13_input_scale, 0.01 + 0.001 * torch.arange(4))


# ---- loading again


# Not fp8-static: vLLM's reload counts its input scales once for gate and once for up, and so takes the layer for
# complete, and processes it, before the last tensors came.
RELOADED = ["bf16", "modelopt-nvfp4", "ct-nvfp4", "ct-mxfp4", "fp8-block", "fp8-dynamic", "ct-fp8-channel", "ct-mxfp8"]


@pytest.mark.parametrize("name", RELOADED)
def test_reload_keeps_addresses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own reload, which restores the checkpoint's parameters and processes them again."""
    load = hook._load

    def record_and_load(layer: Any, case: MoECase) -> None:
        reload.record_metadata_for_reloading(layer)
        load(layer, case)

    monkeypatch.setattr(hook, "_load", record_and_load)
    first = sample(RECIPES[name])
    built = check(first, scheme="fp8-channel-tensor" if name == "fp8-dynamic" else None)
    routed = built.layer.routed_experts

    def addresses() -> dict[str, int]:
        tensors = vars(routed.b12x_experts) | {"parameter": routed.w13_weight.data}
        return {key: tensor.data_ptr() for key, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}

    before, weights = addresses(), routed.b12x_experts
    second = sample(
        dataclasses.replace(first.recipe, store=lambda w, i: first.recipe.store(-2 * w.flip(0), (i + 1) % 12))
    )
    with layer_context(first.case.dtype, "cpu"), torch.no_grad():
        reload.initialize_layerwise_reload(built.layer)
        load(built.layer, second.case)
        reload.finalize_layerwise_reload(built.layer, SimpleNamespace(dtype=first.case.dtype))
    assert routed.b12x_experts is weights
    assert routed.quant_method.moe_kernel.fused_experts.weights is weights
    assert addresses() == before
    x, w, ids = routing(6, first.case)
    assert relative_error(built(x, w, ids), second.expected(x, w, ids)) < BOUND[first.case.dtype]


@pytest.mark.parametrize("name", ["bf16", "modelopt-nvfp4", "fp8-block"])
def test_weights_exist_once(name: str) -> None:
    routed = hook.build(sample(RECIPES[name]).case).layer.routed_experts
    assert routed.w13_weight.data_ptr() == routed.b12x_experts.w13.data_ptr()
    assert routed.w2_weight.data_ptr() == routed.b12x_experts.w2.data_ptr()


def test_weights_exist_once_when_the_core_lays_them_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    original = b12x_core.prepare_experts

    def lay_out(*arguments: Any, **more: Any) -> b12x_core.ExpertWeights:
        weights = original(*arguments, **more)
        return dataclasses.replace(weights, w13=weights.w13.clone(), w2=weights.w2.clone())

    monkeypatch.setattr(b12x_core, "prepare_experts", lay_out)
    test_weights_exist_once("bf16")


def test_warm_up_runs_the_layers_op_at_each_token_count() -> None:
    made = gpt_oss_sample()
    routed = hook.build(made.case).layer.routed_experts
    unit = routed.b12x_warmup_provider.get_b12x_warmup_unit(routed, (1, 8), made.case.dtype)
    unit.compile()
    assert counters.snapshot() == {"fused_moe/mxfp4-w4a16": {"calls": 2, "layers": 1}}


# ---- what is chosen, and what is refused


def test_sixteen_bit_activations_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sample(RECIPES["modelopt-nvfp4"])
    monkeypatch.setenv("B12X_FORCE_A16", "1")
    made.recipe = dataclasses.replace(made.recipe, activation=checkpoints.identity)
    check(made, scheme="nvfp4-w4a16")


def test_other_backends_are_vllms_own() -> None:
    assert fp8.map_fp8_backend("triton") is fp8.Fp8MoeBackend.TRITON
    assert plain.map_unquantized_backend("triton") is plain.UnquantizedMoeBackend.TRITON
    classes = [
        *fp8.backend_to_kernel_cls(fp8.Fp8MoeBackend.TRITON),
        *plain.backend_to_kernel_cls(plain.UnquantizedMoeBackend.TRITON),
        *nvfp4.backend_to_kernel_cls(nvfp4.NvFp4MoeBackend.EMULATION),
    ]
    assert experts.B12xExperts not in classes
    assert mxfp4._get_requested_backends("marlin", None) == [mxfp4.Mxfp4MoeBackend.MARLIN]


def test_register_may_be_called_again() -> None:
    before = fp8.map_fp8_backend
    register()
    assert fp8.map_fp8_backend is before


@pytest.mark.parametrize(
    ("weight", "activation", "scheme"),
    [
        (None, None, "bf16"),
        (keys.kNvfp4Static, keys.kNvfp4Dynamic, "nvfp4-w4a4"),
        (keys.kNvfp4Static, keys.kNvfp4DynamicToken, None),
        (keys.kMxfp4Static, keys.kMxfp8Dynamic, "mxfp4-w4a8"),
        (keys.kFp8StaticTensorSym, keys.kFp8DynamicTokenSym, "fp8-tensor-token"),
        (keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym, "fp8-channel"),
        (keys.kInt8StaticChannelSym, keys.kInt8DynamicTokenSym, None),
        (None, keys.kFp8DynamicTokenSym, None),
    ],
)
def test_schemes_of_keys(weight: Any, activation: Any, scheme: str | None) -> None:
    found = schemes.of_keys(weight, activation, torch.bfloat16)
    assert (found and found.name) == scheme


def test_constants_of_activations() -> None:
    def translate(activation: MoEActivation, **config: float) -> Activation:
        moe: Any = SimpleNamespace(swiglu_limit=9.0, swiglu_alpha=None, swiglu_beta=None)
        return schemes.activation_of(activation, moe, FusedMoEQuantConfig.make(**config))

    assert translate(MoEActivation.SILU) == Activation("silu", limit=9.0)
    assert translate(MoEActivation.SILU, gemm1_clamp_limit=5.0) == Activation("silu", limit=5.0)
    assert translate(MoEActivation.GELU) == b12x_core.GELU
    assert translate(MoEActivation.SWIGLUOAI) == SwiGLU(1.702, 1.0, 9.0)
    assert translate(MoEActivation.SWIGLUOAI_UNINTERLEAVE) == SwiGLU(1.0, 0.0, 9.0)
    assert schemes.interleaved(MoEActivation.SWIGLUOAI)
    assert not schemes.interleaved(MoEActivation.SWIGLUOAI_UNINTERLEAVE)


@pytest.mark.parametrize("activation", [MoEActivation.SITU, MoEActivation.SWIGLUSTEP])
def test_refused_activations(activation: MoEActivation) -> None:
    assert f"b12x has no expert activation {activation.value}" in str(schemes.refuse_activation(activation))


def test_every_activation_of_vllm_is_decided() -> None:
    refused = {activation for activation in MoEActivation if schemes.refuse_activation(activation)}
    assert refused == {MoEActivation.SITU, MoEActivation.SWIGLUSTEP}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("modelopt-nvfp4", {"hidden": 40, "intermediate": 32}, "multiple of 16.*got 40"),
        ("ct-mxfp4-a16", {"intermediate": 48}, "multiple of 32.*got 48"),
        ("ct-mxfp4", {"intermediate": 48}, "multiple of 32.*got 48"),
        ("fp8-block", {"intermediate": 192}, "multiple of 128; got 192"),
    ],
)
def test_refusals_are_one_sentence(name: str, options: dict[str, int], sentence: str) -> None:
    case = MoECase(
        {},
        4,
        2,
        options.get("hidden", 128),
        options.get("intermediate", 128),
        RECIPES[name].quantization,
    )
    with pytest.raises((ValueError, b12x_core.UnsupportedError), match=sentence) as caught:
        hook.build(case)
    assert "\n" not in str(caught.value)


def test_refused_placements_and_dtypes() -> None:
    parallel = SimpleNamespace(
        enable_eplb=True, use_passthrough_all2all=False, use_all2all_kernels=False, all2all_backend="deepep_v2"
    )
    moe: Any = SimpleNamespace(activation=MoEActivation.SILU, moe_parallel_config=parallel, in_dtype=torch.bfloat16)
    assert "EPLB" in str(experts.refuse(moe, SCHEMES["bf16"]))
    parallel.enable_eplb = False
    parallel.use_all2all_kernels, parallel.use_ag_rs_all2all_kernels = True, False
    assert "got deepep_v2" in str(experts.refuse(moe, SCHEMES["bf16"]))
    moe.in_dtype = torch.float32
    assert "bfloat16 or float16" in str(experts.refuse(moe, SCHEMES["bf16"]))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: sample(RECIPES["bf16"], router_weight_on_input=True), "top_k 1"),
        (lambda: sample(RECIPES["bf16"], activation=Activation("gelu", limit=1.0)), "clamps silu and swiglu"),
        (lambda: gpt_oss_sample(dtype=torch.float16), "bfloat16 only"),
        (lambda: sample(RECIPES["fp8-block"], intermediate=160), "multiple of 128"),
        (lambda: sample(RECIPES["modelopt-nvfp4"], biases=True), "biases"),
    ],
)
def test_what_vllm_cannot_express(made: Any, sentence: str) -> None:
    assert sentence in str(hook.cannot_express(made().case))
    assert hook.cannot_express(sample(RECIPES["bf16"]).case) is None


def test_a_tensor_without_a_place() -> None:
    made = sample(RECIPES["bf16"])
    tensors = {**made.case.tensors, "1.gate_proj.zero_point": torch.zeros(1), "2.side_proj.weight": torch.zeros(1)}
    with pytest.raises((AttributeError, b12x_core.ArgumentError), match=r"zero_point|side_proj"):
        hook.build(dataclasses.replace(made.case, tensors=tensors))
    del tensors["1.gate_proj.zero_point"]
    with pytest.raises(b12x_core.ArgumentError, match=r"no place for 2\.side_proj\.weight"):
        hook.build(dataclasses.replace(made.case, tensors=tensors))


def test_a_backend_that_vllm_has_no_member_for() -> None:
    assert oracles.FP8 in [fp8.Fp8MoeBackend.TRITON]
    assert oracles.FP8 != fp8.Fp8MoeBackend.MARLIN
    assert oracles.FP8 is not fp8.Fp8MoeBackend.TRITON
