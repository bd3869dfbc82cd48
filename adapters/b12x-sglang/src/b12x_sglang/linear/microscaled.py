"""Parameters of dense layers in compressed-tensors' MXFP4 and MXFP8, which SGLang has no scheme for."""

from __future__ import annotations

from typing import Any

import torch
from b12x_core import Format
from b12x_core.formats import Element
from sglang.srt.layers.parameter import GroupQuantScaleParameter, ModelWeightParameter

GROUP = 32
"""Values of a row that share a scale (OCP Microscaling Formats v1.0)."""


class MicroscaledParameters:
    """Registers what a checkpoint stores, with SGLang's own loaders.

    Args:
        form: MXFP4 or MXFP8.
    """

    def __init__(self, form: Format) -> None:
        self._form = form

    @property
    def weight_name(self) -> str:
        """What compressed-tensors calls the weight."""
        return "weight_packed" if self._form.element is Element.E2M1 else "weight"

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        """Register the weight (N, K), two values a byte in MXFP4, and its scales (N, K / 32) on a layer."""
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        dtype = torch.uint8 if self._form.packed > 1 else torch.float8_e4m3fn
        shared = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        weight = torch.empty(rows, columns // self._form.packed, dtype=dtype)
        scale = torch.empty(rows, columns // GROUP, dtype=torch.uint8)
        layer.logical_widths = output_partition_sizes
        layer.register_parameter(self.weight_name, ModelWeightParameter(data=weight, **shared))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scale, **shared))
