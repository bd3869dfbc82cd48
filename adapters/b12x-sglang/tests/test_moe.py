"""`--moe-runner-backend b12x`: which layers of SGLang it serves and as what, and what it is refused with.

Layers are SGLang's own, built and loaded as a model's. What they should compute is the conformance suite's oracle; its
problems are the same that run in `conformance/tests`, so here stands what they cannot see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from b12x_conformance.cases import forms
from b12x_conformance.cases.forms import FORMS, Form
from b12x_conformance.cases.moe import GPT_OSS_ACTIVATION, MoEProblem, MoESample, with_sentinels
from b12x_conformance.checkpoints.packings import PACKINGS
from b12x_conformance.oracle.linear import ACTIVATION_RULE
from b12x_conformance.oracle.moe import moe as expected_moe
from b12x_core import (
    GELU_TANH,
    RELU2_NOT_GATED,
    SCHEMES,
    SILU,
    Activation,
    ArgumentError,
    SwiGLU,
    UnsupportedError,
    counters,
)
from b12x_sglang.hooks import moe as hook
from b12x_sglang.hooks.context import layer_context, prepare

prepare("cpu")

from b12x_sglang import moe  # noqa: E402 - SGLang's modules can be imported once its plug-ins are loaded
from b12x_sglang.moe import runner, schemes, weights  # noqa: E402
from b12x_sglang.moe.method import B12xMoEMethod  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import layer as sglang_layer  # noqa: E402
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig  # noqa: E402
from sglang.srt.layers.quantization.fp8 import Fp8Config  # noqa: E402
from sglang.srt.layers.quantization.modelopt_quant import ModelOptMixedPrecisionConfig  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod  # noqa: E402
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config  # noqa: E402

GPT_OSS = forms.GPT_OSS.name


def _more_forms() -> Iterator[Form]:
    """Forms that SGLang loads beside those of the conformance suite."""
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    yield dataclasses.replace(FORMS["fp8-tensor"], name="modelopt-fp8", config=modelopt)
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [128, 128],
            "dynamic": False,
        },
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    }
    compressed = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    block = dataclasses.replace(PACKINGS["fp8-block"], scale="weight_scale")
    yield dataclasses.replace(FORMS["fp8-block"], name="compressed-fp8-block", config=compressed, packing=block)


FORMS |= {form.name: form for form in _more_forms()}
ALL = (*FORMS, GPT_OSS)


@pytest.fixture(autouse=True)
def _counters() -> Iterator[None]:
    counters.reset()
    yield
    counters.reset()


def sample(form: str, **options: Any) -> MoESample:
    """A small layer of random experts."""
    shape = {"experts": 4, "top_k": 2, "hidden": 128, "intermediate": 128}
    if form == GPT_OSS:
        shape["intermediate"], options = 96, {"activation": GPT_OSS_ACTIVATION, **options}
    return MoEProblem(form, form, **shape | options).build("cpu")


def check(made: MoESample, layer: hook.Layer, *, m: int = 12, factor: float = 1.0, local: range | None = None) -> str:
    """Run the layer and compare; returns the scheme that served it."""
    x, (weight, ids) = made.input(m), with_sentinels(made.routes(m), made.rng)
    counters.reset()
    y = layer(x, weight, ids)
    scheme = layer.layer.b12x_experts.weights.scheme.name
    assert list(counters.snapshot()) == [f"fused_moe/{scheme}"]
    problem, rule = made.problem, ACTIVATION_RULE[scheme]
    experts = made.experts
    if rule not in ("nvfp4", "fp8-tensor"):
        experts = [dataclasses.replace(expert, input_scale=None, down_input_scale=None) for expert in experts]
    expected = expected_moe(
        x,
        weight * factor,
        ids,
        experts,
        problem.activation,
        rule,
        local=problem.local if local is None else local,
        router_weight_on_input=False,
    )
    assert float((y.double() - expected).norm() / expected.norm()) < made.bound(scheme).value
    return scheme


def construct(made: MoESample, context: dict[str, Any] | None = None, **options: Any) -> hook.Layer:
    """As the hook builds it, with other arguments of SGLang's layer or of its surroundings."""
    with layer_context(made.case.dtype, "cpu", **context or {}), torch.no_grad():
        layer = hook._construct(made.case, **options)
        hook._load(layer, made.case)
        layer.quant_method.process_weights_after_loading(layer)
        return hook.Layer(made.case, layer)


# ---- what serves a layer


@pytest.mark.parametrize("form", ALL)
def test_every_format_is_served_as_the_checkpoint_says(form: str) -> None:
    made = sample(form)
    layer = hook.build(made.case)
    assert type(layer.layer.quant_method) is B12xMoEMethod
    assert isinstance(layer.layer.runner.runner_core, runner.B12xRunnerCore)
    assert layer.layer.runner_backend.value == "b12x"
    assert layer.layer.b12x_experts.weights.intermediate == made.case.intermediate
    assert check(made, layer) in made.problem.schemes


@pytest.mark.parametrize("form", ALL)
def test_loaders_of_a_gpu(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, SGLang's loader of experts takes branches of its own."""
    monkeypatch.setattr(sglang_layer, "_is_cpu", False)
    made = sample(form)
    check(made, hook.build(made.case))
    made = sample(form, experts=4, top_k=2, ep_rank=1, ep_size=2)
    check(made, hook.build(made.case))


@pytest.mark.parametrize("form", ALL)
def test_every_method_of_sglang_is_understood(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format reaches its own entry of the table, and a layer without an entry is refused."""
    monkeypatch.setattr(schemes, "_SCHEMES_OF_METHODS", {})
    with pytest.raises(UnsupportedError, match=r"experts: b12x does not know the parameters of SGLang's \w+$"):
        hook.build(sample(form).case)


def test_projections_with_scales_of_their_own_are_exact() -> None:
    """By itself, SGLang rounds FP8 weights anew to the larger scale, and takes the gate's global scale in NVFP4."""
    made = sample("fp8-tensor")
    assert check(made, hook.build(made.case)) == "fp8-channel-tensor"
    made = sample("modelopt-nvfp4")
    prepared = hook.build(made.case).layer.b12x_experts.weights
    for number in range(4):
        for half, projection in zip(prepared.w13_global_scale[number].chunk(2), ("gate_proj", "up_proj"), strict=True):
            assert half.eq(made.case.tensors[f"{number}.{projection}.weight_scale_2"]).all()


def test_sixteen_bit_activations_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sample("compressed-nvfp4")
    monkeypatch.setenv("B12X_FORCE_A16", "1")
    assert check(made, hook.build(made.case)) == "nvfp4-w4a16"


@pytest.mark.parametrize("form", ["bf16", "fp8-block", "compressed-fp8-channel"])
def test_other_backends_are_sglangs_own(form: str) -> None:
    with layer_context(torch.bfloat16, "cpu", moe_runner_backend="triton"):
        layer = hook._construct(sample(form).case)
    assert type(layer.quant_method).__module__.startswith("sglang.")
    assert layer.runner_backend.value == "triton"


def test_a_config_of_channels() -> None:
    """SGLang's w8a8_fp8, which is chosen on the command line."""
    made = sample("compressed-fp8-channel")
    assert check(made, construct(made, quant_config=W8A8Fp8Config(is_checkpoint_fp8_serialized=True))) == "fp8-channel"


@pytest.mark.parametrize("form", ["modelopt-nvfp4", "modelopt-nvfp4-w4a16", "modelopt-fp8", "modelopt-mxfp8"])
def test_a_config_of_mixed_precision(form: str) -> None:
    made = sample(form)
    assert made.case.quantization is not None
    layers = {"model.layers.0.mlp.experts": {"quant_algo": made.case.quantization["quant_algo"], "group_size": 16}}
    mixed = ModelOptMixedPrecisionConfig.from_config(
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": []}}
    )
    assert check(made, construct(made, quant_config=mixed)) in made.problem.schemes


def test_float16() -> None:
    made = sample("bf16", dtype=torch.float16)
    tensors = {name: tensor.half() for name, tensor in made.case.tensors.items()}
    layer = hook.build(dataclasses.replace(made.case, tensors=tensors)).layer
    assert layer.b12x_experts.weights.scheme == SCHEMES["fp16"]


def test_register_may_be_called_again() -> None:
    moe.register()


@pytest.mark.parametrize("form", ["compressed-nvfp4", "compressed-fp8-channel", "compressed-mxfp4"])
def test_experts_without_a_gate(form: str) -> None:
    """SGLang's methods for these create the parameters of two projections all the same."""
    made = sample(form, activation=RELU2_NOT_GATED)
    layer = hook.build(made.case)
    assert layer.layer.b12x_experts.weights.w13.shape[1] == 128
    check(made, layer)


def test_compressed_mxfp4_under_either_name() -> None:
    """Some models rename weight_packed to weight before they look for the parameter."""
    made = sample("compressed-mxfp4-w4a16")
    renamed = {name.replace("weight_packed", "weight"): tensor for name, tensor in made.case.tensors.items()}
    first, second = (hook.build(dataclasses.replace(made.case, tensors=t)) for t in (made.case.tensors, renamed))
    assert torch.equal(*(each.layer.b12x_experts.weights.w13 for each in (first, second)))
    assert first.layer.w13_weight.data_ptr() == first.layer.w13_weight_packed.data_ptr()


# ---- routes


@pytest.mark.parametrize("form", ["bf16", "modelopt-nvfp4", GPT_OSS])
def test_routed_scaling_once(form: str) -> None:
    """By the layer, which then must not announce that the routed weights should contain the factor."""
    made = sample(form)
    layer = construct(made, routed_scaling_factor=2.5)
    assert not layer.layer.should_fuse_routed_scaling_factor_in_topk
    check(made, layer, factor=2.5)
    layer.layer.should_fuse_routed_scaling_factor_in_topk = True
    check(made, layer)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", ["bf16", "modelopt-nvfp4", "compressed-nvfp4", "fp8-tensor", GPT_OSS])
def test_expert_parallel(form: str, rank: int) -> None:
    made = sample(form, experts=6, top_k=3, ep_rank=rank, ep_size=2)
    layer = hook.build(made.case)
    assert layer.layer.b12x_experts.weights.num_experts == 3
    check(made, layer)


@pytest.mark.parametrize("form", ["bf16", "modelopt-nvfp4"])
def test_shared_experts_in_the_layer(form: str) -> None:
    """The last expert is on every rank. NVFP4's input scales differ between experts and are stored for all of them."""
    made = sample(form, experts=5, top_k=3)
    layer = construct(made, {"rank": 1, "ranks": 2}, num_fused_shared_experts=1)
    assert layer.layer.b12x_experts.weights.num_experts == 3
    check(made, layer, local=range(2, 5))
    if form == "modelopt-nvfp4":
        stored = [made.case.tensors[f"{number}.down_proj.input_scale"] for number in (2, 3, 4)]
        assert torch.equal(layer.layer.b12x_experts.weights.w2_input_scale, torch.stack(stored))


@pytest.mark.parametrize("form", ["bf16", "modelopt-nvfp4", "fp8-tensor", "compressed-mxfp4-w4a16", GPT_OSS])
def test_tensor_parallel(form: str) -> None:
    """The parts of the intermediate add up. Three blocks of gpt-oss over two ranks are two and one."""
    made = sample(form)
    x, routes = made.input(5), made.routes(5)
    parts = [construct(made, {"rank": rank, "ranks": 2, "ep_size": 1}) for rank in range(2)]
    assert [part.layer.b12x_experts.weights.intermediate for part in parts] == [64, 64]
    y = sum(part(x, *routes).double() for part in parts)
    whole = hook.build(made.case)(x, *routes).double()
    # Each part is rounded; and a block of NVFP4 that ends with the part gives its tokens another rounding.
    assert float((y - whole).norm() / whole.norm()) < 8e-3


# ---- loading


@pytest.mark.parametrize("form", ALL)
def test_a_second_load_keeps_addresses(form: str) -> None:
    first = sample(form)
    layer = hook.build(first.case)
    experts = layer.layer.b12x_experts.weights

    def addresses() -> dict[str, int]:
        return {name: t.data_ptr() for name, t in vars(experts).items() if isinstance(t, torch.Tensor)}

    before = addresses()
    second = MoEProblem("another seed", form, *dataclasses.astuple(first.problem)[2:6], first.problem.activation)
    made = second.build("cpu")
    with layer_context(torch.bfloat16, "cpu"), torch.no_grad():
        layer.layer.quant_method.restore_weights_before_loading(layer.layer)
        hook._load(layer.layer, made.case)
        layer.layer.quant_method.process_weights_after_loading(layer.layer)
    assert layer.layer.b12x_experts.weights is experts
    assert addresses() == before
    check(made, layer)


@pytest.mark.parametrize("form", ["bf16", "modelopt-nvfp4", "compressed-nvfp4", "compressed-mxfp4", "fp8-block"])
def test_weights_exist_once(form: str) -> None:
    layer = hook.build(sample(form).case).layer
    for matrix in ("w13", "w2"):
        for held in weights.weight_parameters(layer, matrix):
            assert held.data_ptr() == getattr(layer.b12x_experts.weights, matrix).data_ptr()
    stored = sum(tensor.nbytes for name, tensor in layer.named_parameters() if not name.endswith("_packed"))
    assert stored < 1.02 * sum(t.nbytes for t in vars(layer.b12x_experts.weights).values() if torch.is_tensor(t))


@pytest.mark.parametrize("form", ["bf16", "compressed-mxfp4"])
def test_weights_laid_out_anew(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the core lay weights out for a kernel, the layer holds these, and makes room for the next checkpoint."""
    original = weights.b12x_core.prepare_expert_projections

    def turned(*arguments: Any, into: Any = None, **named: Any) -> Any:
        fresh = original(*arguments, **named)
        turn = {name: getattr(fresh, name).transpose(1, 2).contiguous() for name in weights.MATRICES}
        fresh = dataclasses.replace(fresh, **turn)
        if into is None:
            return fresh
        into.w13.copy_(fresh.w13)
        into.w2.copy_(fresh.w2)
        return into

    monkeypatch.setattr(weights.b12x_core, "prepare_expert_projections", turned)
    made = sample(form)
    layer = hook.build(made.case).layer
    first = layer.b12x_experts.weights.w13.clone()
    for _ in range(2):
        assert layer.w13_weight.data_ptr() == layer.b12x_experts.weights.w13.data_ptr()
        with layer_context(torch.bfloat16, "cpu"), torch.no_grad():
            layer.quant_method.restore_weights_before_loading(layer)
            hook._load(layer, made.case)
            layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(layer.b12x_experts.weights.w13, first)


def test_a_tensor_without_a_place() -> None:
    made = sample("bf16")
    tensors = {**made.case.tensors, "1.gate_proj.zero_point": torch.zeros(1)}
    with pytest.raises(ArgumentError, match=r"no place for 1\.gate_proj\.zero_point"):
        hook.build(dataclasses.replace(made.case, tensors=tensors))


# ---- activations


def config(**options: Any) -> MoeRunnerConfig:
    return MoeRunnerConfig(**options)


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({}, SILU),
        ({"activation": "gelu_tanh"}, GELU_TANH),
        ({"activation": "relu2", "is_gated": False}, RELU2_NOT_GATED),
        ({"swiglu_limit": 10.0}, Activation("silu", limit=10.0)),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, SwiGLU(1.702, 1.0, 7.0)),
        ({"gemm1_alpha": 1.0, "gemm1_beta": 0.0}, SwiGLU()),
    ],
)
def test_activations(options: dict[str, Any], activation: Activation) -> None:
    assert schemes.activation_of(config(**options)) == activation


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation": "situ"}, "no expert activation situ"),
        ({"gemm1_clamp_limit": 7.0}, "a clamp after it"),
        ({"activation": "gelu", "swiglu_limit": 7.0}, "constants of gated silu only; got swiglu_limit=7.0"),
        ({"is_gated": False, "gemm1_alpha": 1.0}, "gated=False"),
    ],
)
def test_refused_activations(options: dict[str, Any], reason: str) -> None:
    assert reason in str(schemes.activation_of(config(**options)))


def test_rows_alternate_for_gpt_oss_only() -> None:
    """SGLang's own default says they do, and reads it for one activation."""
    assert schemes.interleaved(config(gemm1_alpha=1.702))
    assert not schemes.interleaved(config())
    assert not schemes.interleaved(config(gemm1_alpha=1.702, gate_up_interleaved=False))


# ---- refusals


def refused(made: MoESample, sentence: str, **options: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^model\.layers\.0\.mlp\.experts: .*{sentence}") as caught:
        construct(made, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"no_combine": True}, "no_combine"),
        ({"activation": "situ"}, "no expert activation situ"),
        ({"params_dtype": torch.float32}, "bfloat16 or float16 tokens; got torch.float32"),
        ({"intermediate_size": 100}, "multiple of 16.*got 100"),
        ({"quant_config": Fp8Config()}, "SGLang would quantize these while loading"),
        ({"quant_config": Fp8Config(True, is_fp4_experts=True)}, "no scheme for MXFP4 experts"),
        ({"quant_config": Fp8Config(True, weight_block_size=[64, 64])}, r"128 x 128 blocks; got \[64, 64\]"),
    ],
)
def test_refused_layers(options: dict[str, Any], sentence: str) -> None:
    refused(sample("modelopt-nvfp4"), sentence, **options)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group_size": 32}, "scales of 16 elements; got 32"),
        ({"is_awq": True}, "NVFP4_AWQ"),
        ({"use_per_token_activation": True}, "one of each token"),
        ({"is_checkpoint_nvfp4_serialized": False}, "while loading"),
    ],
)
def test_refused_kinds_of_nvfp4(changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[..., Any] = hook.quantization_config

    def changed(*arguments: Any) -> Any:
        parsed = read(*arguments)
        vars(parsed).update(changes)
        return parsed

    monkeypatch.setattr(hook, "quantization_config", changed)
    refused(sample("modelopt-nvfp4"), sentence)


def test_refused_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sample("bf16")
    with monkeypatch.context() as patch:
        patch.setattr(schemes, "get_moe_a2a_backend", lambda: SimpleNamespace(is_none=lambda: False, value="deepep"))
        refused(made, "standard dispatcher; got the a2a backend deepep")
    for owner, fields, sentence in (
        ("get_exec", {"moe": SimpleNamespace(enable_eplb=True)}, "EPLB"),
        ("get_parallel", {"dwdp_size": 2}, "DWDP"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(schemes, owner, lambda fields=fields: SimpleNamespace(**fields))
            refused(made, sentence)


def test_refused_compressed_tensors() -> None:
    made = sample("compressed-fp8-block")
    settings = dict(made.case.quantization or {})
    group = settings["config_groups"]["group_0"]
    inputs = {**group["input_activations"], "group_size": 64}
    settings["config_groups"] = {"group_0": {**group, "input_activations": inputs}}
    made = dataclasses.replace(made, case=dataclasses.replace(made.case, quantization=settings))
    refused(made, "no scheme for experts with weights .*group_size=64")


def test_experts_that_another_method_holds() -> None:
    with layer_context(torch.bfloat16, "cpu"):
        layer = hook._construct(sample("bf16").case)
        method = B12xMoEMethod(None, None, "experts")
        with pytest.raises(UnsupportedError, match=r"^experts: .*B12xMoEMethod holds them elsewhere"):
            method.create_weights(layer, intermediate_size_per_partition=128, num_experts=4)


def test_a_configuration_that_a_model_changes_after_construction() -> None:
    with layer_context(torch.bfloat16, "cpu"):
        layer = hook._construct(sample("bf16").case)
        layer.moe_runner_config.gemm1_clamp_limit = 7.0
        with pytest.raises(UnsupportedError, match="a clamp after it"):
            layer.quant_method.process_weights_after_loading(layer)


def test_lora_of_experts() -> None:
    layer = hook.build(sample("bf16").case).layer
    with pytest.raises(UnsupportedError, match=r"experts: b12x has no LoRA of experts"):
        layer.quant_method.get_moe_quant_info(layer, layer.runner_backend)


def test_a_method_that_the_model_chose() -> None:
    """SGLang lets a model give the method; a kind that is not understood is refused, not replaced."""

    class Own(UnquantizedFusedMoEMethod):
        """A model's own."""

    made = sample("bf16")
    check(made, construct(made, quant_method=UnquantizedFusedMoEMethod()))
    refused(made, "parameters of SGLang's Own", quant_method=Own())


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: sample("bf16", activation=Activation("gelu", limit=1.0)), "clamps silu and swiglu"),
        (lambda: sample("fp8-block", intermediate=160), "multiple of 128"),
    ],
)
def test_what_sglang_cannot_express(made: Callable[[], MoESample], sentence: str) -> None:
    assert sentence in str(hook.cannot_express(made().case))
    assert hook.cannot_express(sample("bf16").case) is None
