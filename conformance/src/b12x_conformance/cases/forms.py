"""Every form in which a checkpoint may hold a linear layer or an expert, and which schemes may serve it.

Names of tensors and `quantization_config` come from `checkpoints.packings`, the table that also writes whole
checkpoints. The bytes come from here: drawn at random over all codes, rather than quantized from something smooth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from b12x_core.formats import SCHEMES

from b12x_conformance.checkpoints.packings import PACKINGS, Packing, parse
from b12x_conformance.oracle import Quantized
from b12x_conformance.oracle.codecs import E2M1, E4M3, LARGEST


@dataclass(frozen=True)
class Form:
    """A form of checkpoint.

    Attributes:
        name: used in test ids.
        config: `quantization_config`, None for an unquantized checkpoint.
        packing: names of the tensors.
        weight: weight format of the oracle, None for unquantized.
        schemes: the schemes that may serve one projection. More than one where the checkpoint leaves a choice.
        e8m0_scales: scales of fp8-block are stored as float8_e8m0fnu.
        fp16: engines take float16 activations.
    """

    name: str
    config: Mapping[str, Any] | None = field(repr=False)
    packing: Packing = field(repr=False)
    weight: str | None
    schemes: tuple[str, ...]
    e8m0_scales: bool = False
    fp16: bool = True

    @property
    def static_input(self) -> bool:
        """Whether the checkpoint stores a scale of the activation."""
        return self.packing.input_scale is not None

    def schemes_of(self, projections: int) -> tuple[str, ...]:
        """The schemes that may serve some projections fused into one matrix.

        Per-tensor scales of several projections may be kept as a scale for each row, which loses nothing.
        """
        if self.weight != "fp8-tensor" or projections == 1:
            return self.schemes
        by_row = {"fp8-tensor": "fp8-channel-tensor", "fp8-tensor-token": "fp8-channel"}
        return (*self.schemes, *(by_row[scheme] for scheme in self.schemes))

    def as_read(self, multiplier: torch.Tensor) -> torch.Tensor:
        """A global or input scale as a reader gets it: inverted twice where the checkpoint stores divisors."""
        return 1.0 / (1.0 / multiplier) if self.packing.divisors else multiplier

    def tensors(
        self, prefix: str, weight: Quantized | torch.Tensor, input_scale: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The tensors of one projection by their names in the checkpoint."""
        if isinstance(weight, torch.Tensor):
            return {f"{prefix}.weight": weight}
        written = self.packing.write(weight.data, weight.scale, weight.global_scale, input_scale)
        return {f"{prefix}.{name}": tensor for name, tensor in written.items()}


def _weight_only(config: Mapping[str, Any]) -> dict[str, Any]:
    """A compressed-tensors configuration without quantized activations."""
    group = {**config["config_groups"]["group_0"], "input_activations": None}
    return {**config, "config_groups": {"group_0": group}}


def _packed(name: str, weight: str, *, schemes: tuple[str, ...] | None = None, **options: Any) -> Form:
    packing = PACKINGS[options.pop("packing", name)]
    assert packing.config is not None
    config = options.pop("config", None) or packing.config(["lm_head"])
    return Form(name, config, packing, weight, schemes or (packing.scheme.name,), **options)


def _compressed_weight_only(name: str, of: str, weight: str, scheme: str) -> Form:
    packing = PACKINGS[of]
    assert packing.config is not None
    config = _weight_only(packing.config(["lm_head"]))
    return Form(name, config, replace(parse(config), config=packing.config), weight, (scheme,))


_FORMS = (
    _packed("modelopt-nvfp4", "nvfp4"),
    _packed("modelopt-nvfp4-w4a16", "nvfp4"),
    _packed("compressed-nvfp4", "nvfp4"),
    _compressed_weight_only("compressed-nvfp4-w4a16", "compressed-nvfp4", "nvfp4", "nvfp4-w4a16"),
    _packed("compressed-mxfp4", "mxfp4"),
    _packed("compressed-mxfp4-w4a16", "mxfp4"),
    _packed("compressed-fp8-channel", "fp8-channel"),
    _packed("compressed-fp8-tensor", "fp8-tensor"),
    _packed("fp8-block", "fp8-block"),
    _packed("fp8-block-e8m0", "fp8-block", packing="fp8-block", e8m0_scales=True),
    _packed("fp8-tensor", "fp8-tensor"),
    Form(
        "fp8-tensor-dynamic",
        {**PACKINGS["fp8-tensor"].config(["lm_head"]), "activation_scheme": "dynamic"},  # type: ignore[misc]
        replace(PACKINGS["fp8-tensor"], input_scale=None),
        "fp8-tensor",
        # A dynamic scale of the whole input or of each token: the checkpoint does not say, and engines choose.
        ("fp8-tensor", "fp8-tensor-token"),
    ),
    _packed("modelopt-mxfp8", "mxfp8", fp16=False),
    Form("bf16", None, Packing(SCHEMES["bf16"]), None, ("bf16",), fp16=False),
)

FORMS: dict[str, Form] = {form.name: form for form in _FORMS}
"""Every form by its name. "bf16", unquantized, is for experts: linear layers of that form stay with the engine."""

GPT_OSS = Form(
    "gpt-oss-mxfp4",
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    Packing(SCHEMES["mxfp4-w4a16"]),
    "mxfp4",
    ("mxfp4-w4a16",),
    fp16=False,
)
"""gpt-oss experts: fused tensors, gate and up interleaved, with bias. `moe` writes their names."""


def random_weight(form: Form, rows: int, k: int, rng: torch.Generator, shard: int = 0) -> Quantized | torch.Tensor:
    """`random_quantized`, or bf16 values of the same size for an unquantized form."""
    if form.weight is None:
        return (torch.randn(rows, k, generator=rng) * 0.5).bfloat16()
    return random_quantized(form, rows, k, rng, shard)


def random_quantized(form: Form, rows: int, k: int, rng: torch.Generator, shard: int = 0) -> Quantized:
    """A stored weight (rows, k) whose values have an rms near 0.5, so that products stay in the range of fp16.

    Args:
        shard: number of the projection in a fused layer. Per-tensor and global scales are multiplied by 2 ** shard:
            unequal, yet exact for an engine that must bring FP8 shards to one scale while loading.
    """
    step = 2.0**shard
    if form.weight in ("mxfp4", "nvfp4"):
        # All 16 codes are equally likely: rms 2.9.
        data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=rng)
        if form.weight == "mxfp4":
            return Quantized("mxfp4", data, torch.randint(122, 127, (rows, k // 32), dtype=torch.uint8, generator=rng))
        scale = (torch.rand(rows, k // 16, generator=rng) * 440 + 8).to(torch.float8_e4m3fn)
        return Quantized("nvfp4", data, scale, form.as_read(torch.tensor(0.00061 * step)))
    # rms 64, so the largest of some millions of values stays inside 448 and small ones reach the subnormals.
    data = (torch.randn(rows, k, generator=rng) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    if form.weight == "fp8-tensor":
        return Quantized("fp8-tensor", data, torch.tensor(0.0083 * step))
    if form.weight == "fp8-channel":
        return Quantized("fp8-channel", data, torch.rand(rows, 1, generator=rng) * 0.014 + 0.001)
    if form.weight == "mxfp8":
        return Quantized("mxfp8", data, torch.randint(118, 122, (rows, k // 32), dtype=torch.uint8, generator=rng))
    assert form.weight == "fp8-block"
    blocks = (-(-rows // 128), -(-k // 128))
    exponent = torch.randint(118, 122, blocks, dtype=torch.uint8, generator=rng).view(torch.float8_e8m0fnu)
    if form.e8m0_scales:
        return Quantized("fp8-block", data, exponent)
    return Quantized("fp8-block", data, exponent.float() * (1 + torch.rand(blocks, generator=rng)))


def random_input(m: int, k: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Activations (m, k): normal, but every token and a few channels have a magnitude of their own."""
    token = torch.randint(-2, 2, (m, 1), generator=rng)
    channel = 1 + 3 * (torch.rand(1, k, generator=rng) < 0.02)
    return (torch.randn(m, k, generator=rng) * 2.0**token * channel).to(dtype)


def input_scale(form: Form, typical_amax: float = 8.0) -> torch.Tensor | None:
    """A static scale as calibration would leave it: a little too small for the largest values, which saturate."""
    if not form.static_input:
        return None
    largest = LARGEST[E2M1] * LARGEST[E4M3] if form.weight == "nvfp4" else LARGEST[E4M3]
    return form.as_read(torch.tensor(typical_amax / largest, dtype=torch.float32))
