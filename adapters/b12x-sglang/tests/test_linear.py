"""Linear layers of SGLang on b12x: each kind of checkpoint gets its scheme, and the layer computes what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from b12x_conformance.cases.linear import LinearSample, Shards
from b12x_core import SCHEMES, LinearWeights, Support, UnsupportedError, supports_linear
from b12x_core.adapters import LinearCase
from b12x_core.testing.bounds import error
from b12x_sglang.hooks import linear as hook
from b12x_sglang.hooks.context import layer_context
from b12x_sglang.linear import layer as served
from b12x_sglang.linear import register
from b12x_sglang.linear.choice import left_to_engine, method_for
from b12x_sglang.linear.layer import PREPARED, B12xCompressedTensorsScheme, B12xLinearMethod
from linear_forms import GATE_UP, LOADED, ONE, QKV, compressed, problem

every_form = pytest.mark.parametrize("form", LOADED)
every_kind_of_layer = pytest.mark.parametrize("shards", [ONE, GATE_UP, QKV], ids=["one", "gate-up", "qkv"])
fused_or_not = pytest.mark.parametrize("shards", [ONE, QKV], ids=["one", "qkv"])


def prepared(layer: hook.Layer) -> LinearWeights:
    weights: LinearWeights = getattr(layer.module, PREPARED)
    return weights


def check(y: torch.Tensor, sample: LinearSample, x: torch.Tensor, scheme: str) -> None:
    assert error(y, sample.expected(x, scheme)) < sample.bound().value


def build(form: str, shards: Shards, **more: Any) -> tuple[hook.Layer, LinearSample]:
    sample = problem(form, shards, **more).build("cpu")
    return hook.build(sample.case), sample


@every_kind_of_layer
@every_form
def test_layer_serves_its_checkpoint_exactly(form: str, shards: Shards) -> None:
    layer, sample = build(form, shards)
    assert prepared(layer).scheme.name == problem(form, shards).scheme
    x = sample.input(5)
    check(layer(x), sample, x, prepared(layer).scheme.name)


@fused_or_not
@pytest.mark.parametrize("form", ["fp8-tensor", "compressed-nvfp4"])
def test_bias_is_added_once(form: str, shards: Shards) -> None:
    layer, sample = build(form, shards, bias=True)
    x = sample.input(3)
    check(layer(x), sample, x, prepared(layer).scheme.name)
    layer.module.skip_bias_add = True
    with torch.no_grad():
        y, bias = layer.module(x)
    check(y, replace(sample, bias=None), x, prepared(layer).scheme.name)
    assert torch.equal(bias, sample.bias)


@pytest.mark.parametrize("form", ["modelopt-nvfp4-w4a16", "fp8-block"])
def test_float16_activations(form: str) -> None:
    layer, sample = build(form, ONE, dtype=torch.float16)
    x = sample.input(4)
    assert layer(x).dtype == torch.float16
    check(layer(x), sample, x, prepared(layer).scheme.name)


@every_form
def test_what_the_op_reads_is_the_state_of_the_layer(form: str) -> None:
    layer, _ = build(form, QKV)
    weights, state = prepared(layer), layer.module.state_dict()
    assert weights.weight.data_ptr() in {parameter.data_ptr() for parameter in layer.module.parameters()}
    held = {tensor.data_ptr() for tensor in state.values()}
    for tensor in (weights.scale, weights.global_scale, weights.input_scale):
        assert tensor is None or tensor.data_ptr() in held
    # nothing twice but what is a few bytes long
    assert sum(tensor.nbytes for tensor in state.values()) < 1.1 * sum(
        tensor.nbytes for tensor in (weights.weight, weights.scale) if tensor is not None
    )


@every_kind_of_layer
def test_block_scales_load_by_either_name(shards: Shards) -> None:
    """SGLang's Llama calls them weight_scale, whatever the checkpoint calls them."""
    sample = problem("fp8-block", shards).build("cpu")
    renamed = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in sample.case.tensors.items()}
    layer = hook.build(replace(sample.case, tensors=renamed))
    x = sample.input(5)
    check(layer(x), sample, x, "fp8-block")


@fused_or_not
@every_form
def test_a_weight_update_keeps_addresses(form: str, shards: Shards) -> None:
    layer, old = build(form, shards)
    new = problem(form, shards, seed=1).build("cpu")
    tensors = [tensor for tensor in vars(prepared(layer)).values() if isinstance(tensor, torch.Tensor)]
    before = {name: parameter.data_ptr() for name, parameter in layer.module.named_parameters()}
    addresses, weights = [tensor.data_ptr() for tensor in tensors], prepared(layer)
    with layer_context(torch.bfloat16, "cpu"):
        layer.load(new.case.tensors)
    assert prepared(layer) is weights
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert {name: parameter.data_ptr() for name, parameter in layer.module.named_parameters()} == before
    x = new.input(4)
    check(layer(x), new, x, weights.scheme.name)
    assert error(layer(x), old.expected(x, weights.scheme.name)) > 0.1


def test_a_form_that_the_op_repacks_still_exists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def repack(*arguments: Any, into: LinearWeights | None, **scales: Any) -> LinearWeights:
        weights = served_prepare(*arguments, into=None, **scales)
        weights = replace(weights, weight=weights.weight.clone())
        if into is not None:
            into.weight.copy_(weights.weight)
            return into
        return weights

    served_prepare = served.prepare_projections
    monkeypatch.setattr(served, "prepare_projections", repack)
    layer, _ = build("fp8-block", ONE)
    address = prepared(layer).weight.data_ptr()
    assert layer.module.weight.data_ptr() == address
    new = problem("fp8-block", ONE, seed=1).build("cpu")
    with layer_context(torch.bfloat16, "cpu"):
        layer.load(new.case.tensors)
    assert layer.module.weight.data_ptr() == prepared(layer).weight.data_ptr() == address
    assert torch.equal(prepared(layer).weight.float(), new.case.tensors["o_proj.weight"].float())


@pytest.mark.parametrize("form", ["fp8-tensor", "fp8-block", "modelopt-mxfp8", "modelopt-nvfp4", "compressed-nvfp4"])
def test_traces_without_graph_breaks(form: str) -> None:
    torch._dynamo.reset()
    layer, sample = build(form, QKV)
    method = layer.module.quant_method
    compiled = torch.compile(lambda x: method.apply(layer.module, x), fullgraph=True, backend="aot_eager")
    for tokens in (1, 2, 17):
        x = sample.input(tokens)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("form", [name for name, form in LOADED.items() if not SCHEMES[form.schemes[0]].weight_only])
def test_sixteen_bit_activations_only_if_forced(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_FORCE_A16", "1")
    layer, sample = build(form, QKV)
    assert prepared(layer).scheme.weight_only
    x = sample.input(3)
    check(layer(x), sample, x, prepared(layer).scheme.name)


def test_largest_input_scale_of_the_projections_is_used() -> None:
    for form, name, stored in (
        ("modelopt-nvfp4", "input_scale", 2.0**-5),
        ("compressed-nvfp4", "input_global_scale", 2.0**5),
        ("compressed-fp8-tensor", "input_scale", 2.0**-5),
    ):
        sample = problem(form, GATE_UP, input_scale=2.0**-6).build("cpu")
        tensors = {**sample.case.tensors, f"gate_proj.{name}": torch.tensor([stored])}
        weights = prepared(hook.build(replace(sample.case, tensors=tensors)))
        assert weights.input_scale is not None
        assert weights.input_scale.item() == 2.0**-5


# AWQ: what multiplies the activation


def awq(shards: Shards) -> LinearSample:
    sample = problem("modelopt-nvfp4", shards).build("cpu")
    return replace(
        sample, case=replace(sample.case, quantization={**sample.case.quantization, "quant_algo": "NVFP4_AWQ"})
    )


def test_awq_scales_the_activation_first() -> None:
    sample = awq(ONE)
    scale = (torch.rand(256) + 0.5).bfloat16()
    layer = hook.build(replace(sample.case, tensors={**sample.case.tensors, "o_proj.pre_quant_scale": scale}))
    x = sample.input(4)
    check(layer(x), sample, x * scale, "nvfp4-w4a4")


def test_awq_of_fused_projections_is_served_where_their_scales_are_in_the_norm() -> None:
    sample = awq(QKV)
    layer = hook.build(sample.case)
    x = sample.input(4)
    check(layer(x), sample, x, "nvfp4-w4a4")


def test_awq_scales_of_fused_projections_are_refused() -> None:
    sample = awq(GATE_UP)
    scales = {f"{name}.pre_quant_scale": torch.rand(256).bfloat16() for name, _ in GATE_UP}
    with pytest.raises(UnsupportedError, match=r"mlp.gate_up_proj: .*pre_quant_scale"):
        hook.build(replace(sample.case, tensors={**sample.case.tensors, **scales}))


# Blocks of 128 x 128


@pytest.mark.parametrize("form", ["fp8-block", "compressed-fp8-block"])
def test_last_projection_may_end_anywhere(form: str) -> None:
    layer, sample = build(form, (("gate_proj", 256), ("up_proj", 160)))
    x = sample.input(4)
    check(layer(x), sample, x, "fp8-block")


@pytest.mark.parametrize("form", ["fp8-block", "compressed-fp8-block"])
def test_block_scales_that_the_engine_cannot_load_are_refused(form: str) -> None:
    with pytest.raises(UnsupportedError, match=r"self_attn.qkv_proj: .* multiple of 128 rows"):
        build(form, (("q_proj", 192), ("k_proj", 128), ("v_proj", 128)))


# Ranks


def load(module: Any, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, str | int]) -> Any:
    parameters = dict(module.named_parameters())
    for key, tensor in tensors.items():
        projection, _, name = key.rpartition(".")
        parameter = parameters[name]
        parameter.weight_loader(parameter, tensor, *((shards[projection],) if shards else ()))
    module.quant_method.process_weights_after_loading(module)
    return module


PARALLEL = ["fp8-tensor", "fp8-block", "mxfp8", "modelopt-nvfp4", "compressed-nvfp4", "compressed-fp8-channel"]


@pytest.mark.parametrize("form", PARALLEL)
def test_rows_split_over_ranks(form: str) -> None:
    from sglang.srt.layers.linear import QKVParallelLinear

    shards = (("q_proj", 512), ("k_proj", 256), ("v_proj", 256))
    ids: dict[str, str | int] = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
    sample = problem(form, shards).build("cpu")
    config = hook.quantization_config(sample.case.quantization, {"qkv_proj": list(ids)})
    x, parts = sample.input(3), []
    for rank in range(2):
        with layer_context(torch.bfloat16, "cpu", rank=rank, ranks=2), torch.no_grad():
            module = QKVParallelLinear(256, 64, 8, 4, bias=False, quant_config=config, prefix="a.qkv_proj")
            y, _ = load(module, sample.case.tensors, ids)(x)
            parts.append(y.split([256, 128, 128], dim=-1))
    y = torch.cat([torch.cat(both, dim=-1) for both in zip(*parts, strict=True)], dim=-1)
    check(y, sample, x, problem(form, shards).scheme)


@pytest.mark.parametrize("form", PARALLEL)
def test_columns_split_over_ranks(form: str) -> None:
    from sglang.srt.layers.linear import RowParallelLinear

    sample = problem(form, ONE).build("cpu")
    config = hook.quantization_config(sample.case.quantization, {})
    columns = []
    for rank in range(2):
        with layer_context(torch.bfloat16, "cpu", rank=rank, ranks=2), torch.no_grad():
            module = RowParallelLinear(256, 192, bias=False, quant_config=config, prefix="a.o_proj")
            load(module, sample.case.tensors, {})
            # What its forward calls before the ranks' results are added, which takes a group.
            columns.append(module.quant_method.apply(module, torch.eye(128, dtype=torch.bfloat16)))
    weight_only = SCHEMES[problem(form, ONE).scheme].with_16_bit_activations().name
    whole = sample.expected(torch.eye(256, dtype=torch.bfloat16), weight_only)
    assert error(torch.cat(columns), whole) < 0.1  # for the activation, which is rounded


def test_block_scales_of_less_than_a_block_a_rank_are_refused() -> None:
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear

    config = hook.quantization_config(LOADED["fp8-block"].config, {})
    with layer_context(torch.bfloat16, "cpu", rank=0, ranks=2):
        with pytest.raises(UnsupportedError, match=r"a.up_proj: .* 96 rows a rank"):
            ColumnParallelLinear(256, 192, bias=False, quant_config=config, prefix="a.up_proj")
        with pytest.raises(UnsupportedError, match=r"a.o_proj: .* 96 columns a rank"):
            RowParallelLinear(192, 256, bias=False, quant_config=config, prefix="a.o_proj")


# Vocabulary heads


@pytest.mark.parametrize(
    "form", ["modelopt-nvfp4", "modelopt-nvfp4-w4a16", "modelopt-fp8", "mixed-nvfp4", "compressed-nvfp4"]
)
def test_vocabulary_head(form: str) -> None:
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    shards = (("lm_head", 192),)
    sample = problem(form, shards).build("cpu")
    quantization = {**sample.case.quantization, "ignore": []}
    if form.startswith("mixed"):
        quantization["quantized_layers"] = {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}}
    if form.startswith("compressed"):
        quantization["config_groups"] = {
            "group_0": {**quantization["config_groups"]["group_0"], "targets": ["lm_head"]}
        }
    with layer_context(torch.bfloat16, "cpu"), torch.no_grad():
        config = hook.quantization_config(quantization, {})
        head = ParallelLMHead(192, 256, quant_config=config, prefix="lm_head")
        assert isinstance(head.quant_method, B12xLinearMethod) or isinstance(head.scheme, B12xCompressedTensorsScheme)
        load(head, sample.case.tensors, {})
        assert logits_processor.should_apply_lm_head_quant_method(head, head.quant_method)
        x = sample.input(3)
        check(head.quant_method.apply(head, x)[:, :192], sample, x, problem(form, shards).scheme)
        # A draft model is given its target's head.
        head.weight = torch.nn.Parameter(torch.zeros(192, 256, dtype=torch.bfloat16))
        assert not logits_processor.should_apply_lm_head_quant_method(head, head.quant_method)


# What is not served, and what is left alone


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the core refuse a scheme."""

    def refuse(refused: str) -> None:
        def answer(scheme: Any, n: int, k: int, device: Any) -> Support:
            if scheme.name == refused:
                return Support(False, f"no linear kernel for {refused} here")
            return supports_linear(scheme, n, k, device)

        monkeypatch.setattr(served, "supports_linear", answer)

    return refuse


@every_form
def test_refused_scheme_is_an_error_with_the_reason_not_another_scheme(
    form: str, refusing: Callable[[str], None]
) -> None:
    scheme = problem(form, ONE).scheme
    refusing(scheme)
    with pytest.raises(UnsupportedError, match=rf"o_proj: no linear kernel for {scheme} here"):
        build(form, ONE)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({**FP8, "weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        ({**LOADED["modelopt-nvfp4"].config, "group_size": 32}, "a scale for 32 FP4 values"),
        (
            {
                **compressed({"strategy": "channel"}, None),
                "sparsity_config": {"format": "dense", "targets": ["Linear"], "sparsity_structure": "unstructured"},
            },
            "sparsity_config",
        ),
    ],
)
def test_refusals_name_the_layer_and_the_reason(quantization: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"model.layers.0.o_proj: .*{reason}") as caught:
        hook.build(LinearCase(ONE, 256, {}, quantization))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["fp8", "w8a8_fp8", "mxfp8"])
def test_weights_quantized_while_loading_are_refused(method: str) -> None:
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config

    config = W8A8Fp8Config() if method == "w8a8_fp8" else Fp8Config(use_mxfp8=method == "mxfp8")
    with (
        layer_context(torch.bfloat16, "cpu"),
        pytest.raises(UnsupportedError, match=r"a\.o_proj: quantizes 16-bit weights while loading"),
    ):
        ReplicatedLinear(256, 192, quant_config=config, prefix="a.o_proj")


def test_methods_that_the_flags_are_about_are_never_left_to_the_engine() -> None:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A16Fp8
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
    from sglang.srt.layers.quantization.quark.quark import QuarkLinearMethod

    class Other(Fp8LinearMethod):
        pass

    scheme = CompressedTensorsW8A16Fp8("channel", is_static_input_scheme=False)
    with layer_context(torch.bfloat16, "cpu"):
        other = Other(Fp8Config(is_checkpoint_fp8_serialized=True))
        with pytest.raises(UnsupportedError, match=r"a: .* know SGLang's Other"):
            method_for(other, "a")
        with pytest.raises(UnsupportedError, match=r"a: .* Quark"):
            method_for(QuarkLinearMethod(None), "a")
        with pytest.raises(UnsupportedError, match=r"a: .* CompressedTensorsW8A16Fp8"):
            left_to_engine(scheme, "a")
    with layer_context(torch.bfloat16, "cpu", fp8_gemm_runner_backend="auto"):
        assert method_for(other, "a") is other
        assert left_to_engine(scheme, "a") is scheme


@pytest.mark.parametrize("quantization", [None, {**FP8, "modules_to_not_convert": ["o_proj"]}])
def test_unquantized_layers_stay_with_the_engine(quantization: dict[str, Any] | None) -> None:
    case = LinearCase(ONE, 64, {"o_proj.weight": torch.zeros(192, 64, dtype=torch.bfloat16)}, quantization)
    with pytest.raises(UnsupportedError, match="unquantized"):
        hook.build(case)


@pytest.mark.parametrize(
    ("flag", "ours", "others"),
    [("fp8", "fp8-tensor", "modelopt-nvfp4"), ("fp4", "modelopt-nvfp4", "fp8-tensor")],
)
def test_each_flag_is_about_its_own_formats(flag: str, ours: str, others: str) -> None:
    from sglang.srt.layers.linear import ReplicatedLinear

    other = {"fp8": "fp4", "fp4": "fp8"}[flag]
    with layer_context(torch.bfloat16, "cpu", **{f"{other}_gemm_runner_backend": "auto"}):
        for form, expected in ((ours, True), (others, False)):
            config = hook.quantization_config(LOADED[form].config, {})
            layer = ReplicatedLinear(256, 192, quant_config=config, prefix="a.o_proj")
            assert isinstance(layer.quant_method, B12xLinearMethod) is expected


def test_the_loader_of_fused_scales_knows_the_method_once() -> None:
    from sglang.srt.layers import linear

    register()
    assert linear.WEIGHT_LOADER_V2_SUPPORTED.count(B12xLinearMethod.__name__) == 1
