"""Linear layers of vLLM on b12x: each kind of checkpoint gets its scheme, and the layer computes what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import vllm.model_executor.kernels.linear as engine
from b12x_core import SCHEMES, Support, UnsupportedError, supports_linear
from b12x_core.adapters import LinearCase
from b12x_vllm import linear as adapter
from b12x_vllm.hooks import linear as hook
from b12x_vllm.hooks.context import layer_context
from b12x_vllm.linear import kernels
from b12x_vllm.linear.kernels import PREPARED
from linear_checkpoints import BY_NAME, GATE_UP, KINDS, ONE, QKV, Kind, Tensors, activations, make
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils import quant_utils as keys
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.utils import weights_already_processed
from vllm.platforms import PlatformEnum, current_platform

adapter.register()

Fp8, Block, W8A16 = adapter.B12xFp8Linear, adapter.B12xFp8BlockLinear, adapter.B12xFp8W8A16Linear
MxFp8, MxFp4 = adapter.B12xMxFp8Linear, adapter.B12xMxFp4Linear


@pytest.fixture(autouse=True)
def _start_afresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected).abs().max() / expected.abs().max())


every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def prepared(layer: hook.Layer) -> Any:
    return getattr(layer.module, PREPARED)


def kernel_of(layer: hook.Layer) -> object:
    holders = (getattr(layer.module, "scheme", None), layer.module.quant_method)
    names = ("kernel", "fp8_linear", "linear_kernel")
    return next(getattr(holder, name) for holder in holders for name in names if hasattr(holder, name))


@pytest.mark.parametrize("shards", [ONE, GATE_UP, QKV], ids=["one", "gate-up", "qkv"])
@every_kind
def test_layer_serves_its_checkpoint_exactly(kind: Kind, shards: tuple[tuple[str, int], ...]) -> None:
    case, dense = make(kind, shards)
    layer = hook.build(case)
    scheme = kind.fused_scheme if kind.fused_scheme and len(shards) > 1 else kind.scheme
    assert type(kernel_of(layer)).__name__ == f"B12x{kind.kernel}"
    assert prepared(layer).scheme.name == scheme
    x = activations(kind, 5, case.k)
    assert relative(layer(x), x.float() @ dense.T) < 2**-8


@pytest.mark.parametrize("kind", [BY_NAME["fp8-static"], BY_NAME["nvfp4-ct"]], ids=str)
@pytest.mark.parametrize("shards", [ONE, QKV], ids=["one", "qkv"])
def test_bias_is_added_once(kind: Kind, shards: tuple[tuple[str, int], ...]) -> None:
    case, dense = make(kind, shards)
    biases = {name: torch.randn(rows, dtype=case.dtype) for name, rows in shards}
    layer = hook.build(replace(case, tensors={**case.tensors, **{f"{name}.bias": b for name, b in biases.items()}}))
    x = activations(kind, 3, case.k)
    assert relative(layer(x), x.float() @ dense.T + torch.cat(list(biases.values())).float()) < 2**-8


def test_float16_activations() -> None:
    kind = BY_NAME["nvfp4-a16-modelopt"]
    case, dense = make(kind, ONE, dtype=torch.float16)
    x = torch.randn(2, 3, case.k, dtype=torch.float16)
    y = hook.build(case)(x)
    assert y.dtype == torch.float16
    assert relative(y, x.float() @ dense.T) < 2**-10


@every_kind
def test_parameters_are_the_storage(kind: Kind) -> None:
    layer = hook.build(make(kind, QKV)[0])
    held = {parameter.data_ptr() for parameter in layer.module.parameters()}
    weights = prepared(layer)
    for tensor in (weights.weight, weights.scale, weights.global_scale, weights.input_scale):
        assert tensor is None or tensor.data_ptr() in held


def reload(layer: hook.Layer, tensors: Tensors) -> None:
    """Load other weights into a layer as an engine that keeps running does."""
    with layer_context(torch.bfloat16, "cpu"):
        initialize_layerwise_reload(layer.module)
        layer.feed(tensors)
        finalize_layerwise_reload(layer.module, None)


def addresses(layer: hook.Layer) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in layer.module.named_parameters()}


@pytest.mark.parametrize("shards", [ONE, QKV], ids=["one", "qkv"])
@every_kind
def test_reload_keeps_addresses(kind: Kind, shards: tuple[tuple[str, int], ...]) -> None:
    (first, old), (second, new) = make(kind, shards), make(kind, shards)
    layer = hook.build(first)
    before, weights = addresses(layer), prepared(layer)
    reload(layer, dict(second.tensors))
    assert addresses(layer) == before
    assert prepared(layer) is weights
    x = activations(kind, 4, first.k)
    assert relative(layer(x), x.float() @ new.T) < 2**-8
    assert relative(layer(x), x.float() @ old.T) > 0.1


def test_e8m0_block_scales_kept_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Config, "is_scale_e8m0", True, raising=False)
    kind = BY_NAME["fp8-block-e8m0"]
    (first, dense), (second, new) = make(kind, QKV), make(kind, QKV)
    layer = hook.build(first)
    x = activations(kind, 4, first.k)
    assert relative(layer(x), x.float() @ dense.T) < 2**-8
    before = addresses(layer)
    reload(layer, dict(second.tensors))
    assert addresses(layer) == before
    assert relative(layer(x), x.float() @ new.T) < 2**-8


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-static", "fp8-ct-tensor", "fp8-modelopt"])
def test_weights_with_a_tiny_scale_are_not_quantized_again(name: str) -> None:
    kind = BY_NAME[name]
    case, _ = make(kind, ONE)
    scale = torch.tensor([2.0**-30])
    layer = hook.build(replace(case, tensors={**case.tensors, "o_proj.weight_scale": scale}))
    assert torch.equal(prepared(layer).weight.float(), case.tensors["o_proj.weight"].float())


@every_kind
def test_traces_without_graph_breaks(kind: Kind) -> None:
    case, _ = make(kind, QKV)
    bias = {f"{name}.bias": torch.randn(rows, dtype=case.dtype) for name, rows in QKV}
    layer = hook.build(replace(case, tensors={**case.tensors, **bias}))
    compiled = torch.compile(layer.module, fullgraph=True, backend="aot_eager")
    for tokens in (1, 2, 17):
        x = activations(kind, tokens, case.k)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not SCHEMES[kind.scheme].weight_only], ids=str)
def test_sixteen_bit_activations_only_if_forced(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B12X_FORCE_A16", "1")
    case, dense = make(kind, QKV)
    layer = hook.build(case)
    assert type(kernel_of(layer)).__name__ == f"B12x{kind.kernel}"
    assert prepared(layer).scheme.weight_only
    x = torch.randn(3, case.k).bfloat16()
    assert relative(layer(x), x.float() @ dense.T) < 2**-8


def test_flag_means_these_kernels_and_no_others() -> None:
    assert engine._LINEAR_BACKEND_KERNEL_MAP["b12x"] == {*adapter.KERNELS, W8A16}
    for platform in adapter.PLATFORMS:
        for table in _tables():
            served = [kernel for kernel in table[platform] if kernel.__module__.startswith("b12x_vllm.")]
            assert len(served) == len(set(served)) > 0
            # the engine's own come first, so that `auto` prefers them
            assert table[platform][-len(served) :] == served


def _tables() -> list[dict[PlatformEnum, list[type]]]:
    names = ("FP8", "FP8_BLOCK", "WFP8A16", "MXFP8", "NVFP4", "MXFP4")
    return [getattr(engine, f"_POSSIBLE_{name}_KERNELS") for name in names]


def test_registering_again_changes_nothing() -> None:
    before = [{platform: list(kernels) for platform, kernels in table.items()} for table in _tables()]
    adapter.register()
    assert before == [dict(table) for table in _tables()]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the core refuse a scheme."""

    def refuse(refused: str) -> None:
        def answer(scheme: Any, n: int, k: int, device: Any) -> Support:
            if scheme.name == refused:
                return Support(False, f"no linear kernel for {refused} here")
            return supports_linear(scheme, n, k, device)

        monkeypatch.setattr(kernels, "supports_linear", answer)

    return refuse


@pytest.mark.parametrize("kind", [BY_NAME["nvfp4-modelopt"], BY_NAME["nvfp4-ct"], BY_NAME["mxfp4-ct"]], ids=str)
def test_refused_w4a4_is_an_error_with_the_reason_not_w4a16(kind: Kind, refusing: Callable[[str], None]) -> None:
    refusing(kind.scheme)
    with pytest.raises(ValueError, match=f"no linear kernel for {kind.scheme} here"):
        hook.build(make(kind, ONE)[0])


# vLLM's MXFP8 configuration does not say that activations stay in 16 bits: that kind is refused when it loads.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.scheme != "mxfp8-w8a16"], ids=str)
def test_a_kind_asks_the_core_about_its_own_scheme(kind: Kind, refusing: Callable[[str], None]) -> None:
    scheme = "fp8-tensor-w8a16" if kind.name == "fp8-a16-tensor" else kind.scheme
    refusing(scheme)
    with pytest.raises(ValueError, match=f"no linear kernel for {scheme} here"):
        hook.build(make(kind, ONE)[0])


def test_a_shape_unknown_to_the_configuration_is_refused_at_load() -> None:
    kernel = adapter.B12xMxFp4Linear(engine.MxFp4LinearLayerConfig(keys.kMxfp4Dynamic))
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UnsupportedError, match="K to be a multiple of 32"):
        kernel.process_weights_after_loading(layer)


def _fp8_config(weight: Any, activation: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    return engine.FP8ScaledMMLinearLayerConfig(weight, activation, (128, 128), dtype, dtype)


@pytest.mark.parametrize(
    ("kernel", "config", "reason"),
    [
        (Fp8, _fp8_config(keys.kFp8StaticTensorSym, keys.kFp8StaticTokenSym), "serves no FP8 weights with scale"),
        (Fp8, _fp8_config(keys.kFp8StaticTensorSym, keys.kFp8DynamicTokenSym, torch.float32), "see --dtype"),
        (Block, _fp8_config(keys.kFp8Static128BlockSym, keys.kFp8Dynamic64Sym), "serves no FP8 weights with scale"),
        (MxFp4, engine.MxFp4LinearLayerConfig(keys.kInt8Dynamic32Sym), "serves no activations"),
        (MxFp8, engine.Mxfp8LinearLayerConfig((128, 128), bmm_batch_size=4), "not batches"),
        (MxFp8, engine.Mxfp8LinearLayerConfig((128, 48)), "multiple of 32"),
    ],
)
def test_refusals_say_why(kernel: Any, config: Any, reason: str) -> None:
    ok, why = kernel.can_implement(config)
    assert not ok
    assert reason in why
    assert "\n" not in why


def test_a_gpu_without_kernels_is_refused_with_the_reason_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.delenv("B12X_REFERENCE", raising=False)
    for kernel in (*adapter.KERNELS, W8A16):
        ok, why = kernel.is_supported(75)
        assert not ok
        assert "compute capability 7.5" in why
    monkeypatch.setenv("B12X_REFERENCE", "1")
    assert all(kernel.is_supported(75) == (True, None) for kernel in (*adapter.KERNELS, W8A16))


def test_batch_invariance_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    ok, why = Fp8.is_supported()
    assert not ok
    assert "VLLM_BATCH_INVARIANT" in why


def test_block_scales_that_the_engine_cannot_load_are_refused() -> None:
    kind = BY_NAME["fp8-block"]
    shards = (("q_proj", 192), ("k_proj", 128), ("v_proj", 128))
    case, _ = make(kind, shards)
    with pytest.raises(UnsupportedError, match=r"self_attn.qkv_proj: .* multiple of 128 rows"):
        hook.build(case)


@pytest.mark.parametrize("config", [None, {"quant_method": "mxfp4"}])
def test_unquantized_layers_stay_with_the_engine(config: dict[str, Any] | None) -> None:
    case = LinearCase(ONE, 64, {"o_proj.weight": torch.zeros(192, 64, dtype=torch.bfloat16)}, config)
    with pytest.raises(UnsupportedError, match="unquantized"):
        hook.build(case)


@pytest.mark.parametrize("name", ["fp8-dynamic", "nvfp4-modelopt"])
def test_weights_from_the_weight_cache_are_refused(name: str) -> None:
    with weights_already_processed(), pytest.raises(UnsupportedError, match="ipc_cache"):
        hook.build(make(BY_NAME[name], QKV)[0])


def test_smaller_of_two_input_divisors_is_used() -> None:
    kind = BY_NAME["nvfp4-ct"]
    case, _ = make(kind, GATE_UP)
    tensors = {**case.tensors, "up_proj.input_global_scale": torch.tensor([2.0**5])}
    assert prepared(hook.build(replace(case, tensors=tensors))).input_scale.item() == 2.0**-5
