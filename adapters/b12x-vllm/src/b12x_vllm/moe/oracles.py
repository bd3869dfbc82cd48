"""What makes vLLM choose `B12xExperts` for `--moe-backend b12x`, and hands them the layers' weights.

vLLM chooses MoE kernels in one module per format, its oracles. They have no registry, so functions in them are
replaced, each for requests of b12x alone: any other backend gets vLLM's own behaviour. A name that an oracle looks up
in its own module is replaced there; one that other modules have imported takes a replacement in each of them and is
the last resort. Beside every replacement stands why nothing narrower would do.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
from collections.abc import Callable
from typing import Any

import b12x_core
import torch
from b12x_core import ExpertWeights, Scheme, compressed_tensors
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, mxfp8, nvfp4
from vllm.model_executor.layers.fused_moe.oracle import unquantized as plain
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from b12x_vllm.moe import experts, schemes
from b12x_vllm.moe.experts import B12xExperts, LoadedScales

logger = init_logger("vllm.plugins.b12x")

FLAG = "b12x"


class _Backend:
    """b12x as a value of one of vLLM's closed enumerations of backends that have no member for it.

    It equals the member whose branches leave the weights as the checkpoint has them, so those branches serve it too,
    in all the functions that ask; by identity and in logs it is b12x.
    """

    value = "B12X"

    def __init__(self, like: object) -> None:
        self._like = like

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._like

    def __hash__(self) -> int:
        return hash(self._like)


FP8 = _Backend(fp8.Fp8MoeBackend.TRITON)
UNQUANTIZED = _Backend(plain.UnquantizedMoeBackend.TRITON)

_installed = False


def install() -> None:
    """Replace what has to be replaced. May be called again."""
    global _installed
    if _installed:
        return
    _install_choice()
    _install_formats()
    _install_layers()
    _installed = True


def _wrap(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace module.name by a function that gets the original as its first argument."""
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(functools.partial(replacement, original)))


def _install_choice() -> None:
    """Resolve the flag to `B12xExperts` in every oracle."""
    # The maps from the flag's value to a backend are literals inside these functions, and raise for values they lack.
    _wrap(fp8, "map_fp8_backend", lambda original, name: FP8 if name == FLAG else original(name))
    _wrap(plain, "map_unquantized_backend", lambda original, name: UNQUANTIZED if name == FLAG else original(name))
    mxfp8._BACKEND_NAME_MAP[FLAG] = FP8

    def ours(*backends: object) -> Callable[..., list[type]]:
        def choose(original: Callable[[object], list[type]], backend: object) -> list[type]:
            return [B12xExperts] if any(backend is mine for mine in backends) else original(backend)

        return choose

    # From a backend to its classes. vLLM has a native class for the FP4 backends of the upstream package; replacing
    # that class instead would take it from the block codecs that only upstream has, which use it by name.
    for module, backends in (
        (nvfp4, (nvfp4.NvFp4MoeBackend.B12X,)),
        (mxfp4, mxfp4.B12X_BACKENDS),
        (fp8, (FP8,)),
        (mxfp8, (FP8,)),
        (plain, (UNQUANTIZED,)),
    ):
        _wrap(module, "backend_to_kernel_cls", ours(*backends))

    # For a checkpoint of MXFP4 weights that asks for nothing, vLLM's policy for b12x is to quantize activations to
    # MXFP8. Here a scheme changes only on request, so such a checkpoint is W4A16. The policy stands in this function.
    _wrap(mxfp4, "_get_requested_backends", _requested_mxfp4_backends)

    # The kernel's maker checks the class once more, with the first pair of keys that the class has at all instead of
    # the pair that was chosen.
    def keys_of(original: Callable[..., Any], experts_cls: type, backend: Any) -> Any:
        if experts_cls is not B12xExperts:
            return original(experts_cls, backend)
        return kMxfp4Static, mxfp4._backend_activation_key(backend)

    _wrap(mxfp4, "_mxfp4_quant_keys_for_experts", keys_of)


def _requested_mxfp4_backends(original: Callable[..., list[Any]], name: str, activation_key: Any) -> list[Any]:
    if name != FLAG:
        return original(name, activation_key)
    if envs.VLLM_B12X_MOE_FP4_FORCE_A16:
        activation_key = None
    elif activation_key is None:
        activation_key = mxfp4._user_moe_activation_override()
    return [backend for backend in mxfp4.B12X_BACKENDS if mxfp4._backend_activation_key(backend) == activation_key]


def _install_formats() -> None:
    """Keep weights as the checkpoint has them where vLLM would convert them for the upstream package, or cannot."""

    # Called for NvFp4MoeBackend.B12X only, in nvfp4.convert_to_nvfp4_moe_kernel_format, which quantization methods
    # have imported by name.
    def keep(*, is_act_and_mul: bool, reorder_w13: bool = False, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensors[name] for name in _NVFP4_TENSORS)

    nvfp4.prepare_nvfp4_moe_layer_for_b12x = keep

    # gpt-oss has a converter of its own without a branch for b12x. The methods that use it have imported it by name.
    for module in ("quantization.mxfp4", "quantization.quark.quark_moe"):
        _wrap(
            importlib.import_module(f"vllm.model_executor.layers.{module}"),
            "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
            _convert_gpt_oss,
        )

    # Rounding FP8 weights anew to the larger scale of gate and up loses up to half of their precision, and b12x takes
    # both scales. Neither this function nor its arguments know the layer, so it asks whose weights are in process.
    def keep_shards(
        original: Callable[..., Any], weight: torch.Tensor, scale: torch.Tensor, *arguments: Any, **more: Any
    ) -> Any:
        if not _keep_shard_scales.get():
            return original(weight, scale, *arguments, **more)
        return weight, scale.amax(dim=1)

    for module in (
        "quantization.fp8",
        "quantization.modelopt",
        "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8",
    ):
        _wrap(
            importlib.import_module(f"vllm.model_executor.layers.{module}"),
            "process_fp8_weight_tensor_strategy_moe",
            keep_shards,
        )


_keep_shard_scales: contextvars.ContextVar[bool] = contextvars.ContextVar("b12x_keep_shard_scales", default=False)
"""Whether the weights that vLLM is processing belong to a layer of ours."""

_NVFP4_TENSORS = ("w13", "w13_scale", "w13_scale_2", "a13_scale", "w2", "w2_scale", "w2_scale_2", "a2_scale")


def _convert_gpt_oss(original: Callable[..., Any], *, mxfp4_backend: Any, **arguments: Any) -> Any:
    if mxfp4_backend not in mxfp4.B12X_BACKENDS:
        return original(mxfp4_backend=mxfp4_backend, **arguments)
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
    return tuple(arguments.get(name) for name in names)


def _install_layers() -> None:
    """Prepare the experts of every layer that was given `B12xExperts`, after each loading of its weights."""
    # Only some quantization methods call the experts' own `process_weights_after_loading` (FP8 and MXFP8 do not,
    # the unquantized one does not when weights are loaded again), and only before their own processing are the scales
    # of both projections there. All methods reach a layer through this function. A subclass registered with vLLM's
    # out-of-tree layers would not do: layer classes of models (gpt-oss) do not inherit from it.
    original = RoutedExperts._get_quant_method

    @functools.wraps(original)
    def get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        method = original(self, prefix, quant_config, moe_config)
        if getattr(method, "experts_cls", None) is B12xExperts:
            _serve(self, method, prefix, quant_config)
        return method

    RoutedExperts._get_quant_method = get_quant_method


def _serve(layer: Any, method: Any, prefix: str, quant_config: Any) -> None:
    """Follow the processing of a layer's weights with the preparation of its experts."""
    declared = _declared_scheme(layer, method, prefix, quant_config)
    process = method.process_weights_after_loading

    @functools.wraps(process)
    def process_and_prepare(layer: Any) -> None:
        loaded = LoadedScales.of(layer)
        token = _keep_shard_scales.set(True)
        try:
            process(layer)
        finally:
            _keep_shard_scales.reset(token)
        kernel, config = method.moe_kernel, method.moe_quant_config
        if kernel is None or config is None:
            return  # a method that quantizes while it loads has not seen all weights yet
        scheme = declared or schemes.of_config(config, method.moe.in_dtype)
        earlier: ExpertWeights | None = getattr(layer, "b12x_experts", None)
        weights = experts.prepare(layer, method.moe, config, scheme, loaded, earlier)
        layer.b12x_experts = weights
        kernel.fused_experts.serve(layer, weights)
        logger.info_once("b12x serves mixtures of experts as %s", weights.scheme.name)

    method.process_weights_after_loading = process_and_prepare


def _declared_scheme(layer: Any, method: Any, prefix: str, quant_config: Any) -> Scheme | None:
    """The scheme of a compressed-tensors checkpoint of MXFP4 weights; None elsewhere.

    vLLM's choice for such a checkpoint knows its weights only. What it declares for activations stands in the
    quantization config.

    Raises:
        UnsupportedError: no such scheme is served.
    """
    if getattr(method, "mxfp4_backend", None) is not mxfp4.Mxfp4MoeBackend.B12X_MXFP4_BF16:
        return None
    if envs.VLLM_B12X_MOE_FP4_FORCE_A16 or not hasattr(quant_config, "get_scheme_dict"):
        return None
    arguments = quant_config.get_scheme_dict(layer, f"{prefix}.0.{layer.ckpt_down_proj_name}")
    inputs = arguments["input_activations"]
    scheme = compressed_tensors.scheme(arguments["weights"], inputs)
    if scheme is None:
        raise b12x_core.UnsupportedError(f"{prefix}: b12x has no scheme for MXFP4 experts with activations {inputs}")
    reason = experts.refuse(method.moe, b12x_core.serving_scheme(scheme))
    if reason is not None:
        raise b12x_core.UnsupportedError(f"{prefix}: {reason}")
    return scheme
