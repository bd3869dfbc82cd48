"""Layouts of quantized activations: plans, and the memory that they are written to."""

from __future__ import annotations

import itertools

import pytest
import torch
from b12x_core.formats import FP8_GROUP, FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, Format
from b12x_core.ops._quantize_kernel import _codes, _scales, aligned, rows_aligned
from b12x_core.planning.quantize import FORMATS, LAYOUTS, PARTIALS
from b12x_core.planning.quantize_plan import MAX_THREADS, layouts, plan_quantize

TOKENS = (1, 2, 8, 16, 17, 100, 4096)
WIDTHS = (32, 160, 576, 2880, 5120, 17408, 40000)


@pytest.mark.parametrize("form", FORMATS)
def test_every_layout_has_a_plan(form: str) -> None:
    assert set(layouts(form)) <= set(LAYOUTS)
    for layout, m, k, count in itertools.product(layouts(form), TOKENS, WIDTHS, (48, 132, 188)):
        for static in (False, True):
            launches = plan_quantize(form, "bf16", m, k, count, layout=layout, static=static)
            assert len(launches) == (2 if form == "fp8-tensor" and not static and m > 1 else 1)
            for launch in launches:
                config = launch.config
                assert config.layout == layout
                assert config.threads % 32 == 0
                assert config.threads * config.rows <= MAX_THREADS
                assert 0 <= launch.ctas <= PARTIALS
                assert ("ctas" in config.arguments) == (launch.ctas > 0)
                assert ("given" in config.arguments) == (form == "nvfp4")
                by_block = config.step == "blocks"
                assert ("scale" in config.arguments) == (
                    config.step != "amax" and not (by_block and layout == "values")
                )


@pytest.mark.parametrize(
    ("m", "k", "parts"), [(1, 17408, 9), (8, 17408, 9), (16, 17408, 1), (16, 8192, 4), (1, 5120, 1)]
)
def test_few_long_rows_are_divided_among_blocks(m: int, k: int, parts: int) -> None:
    (launch,) = plan_quantize("fp8-row", "bf16", m, k, 132)
    assert launch.config.parts == parts
    assert launch.config.vectors % parts == 0


def test_scales_that_hold_values_are_not_written_again() -> None:
    (launch,) = plan_quantize("mxfp8", "bf16", 1, 64, 132, layout="values")
    assert launch.config.arguments == ("x", "q")
    assert launch.config.stored == "bf16"
    (launch,) = plan_quantize("fp8-row", "bf16", 1, 64, 132, layout="values")
    assert launch.config.arguments == ("x", "q", "scale")
    (launch,) = plan_quantize("nvfp4", "bf16", 1, 64, 132, layout="values")
    assert launch.config.arguments == ("x", "q", "given")


@pytest.mark.parametrize(
    ("fmt", "layout", "codes", "scales"),
    [
        (FP8_TENSOR, "row", (9, 208), (1,)),
        (FP8_ROW, "row", (9, 208), (9,)),
        (FP8_ROW, "values", (9, 200), (9,)),
        (FP8_GROUP, "row", (9, 208), (9, 2)),
        (FP8_GROUP, "k-major", (9, 208), (2, 12)),
        (MXFP8, "tiles64", (9, 208), (4, 16, 2)),
        (MXFP8, "tiles128", (9, 208), (2, 16, 4)),
        (MXFP8, "values", (9, 200), (0,)),
        (MXFP4, "tiles128", (9, 112), (2, 16, 4)),
        (NVFP4, "tiles128", (9, 112), (2, 16, 8)),
        (NVFP4, "values", (9, 200), (0,)),
        (NVFP4, "row", (9, 112), (9, 13)),
    ],
    ids=str,
)
def test_memory_of_a_layout(fmt: Format, layout: str, codes: tuple[int, ...], scales: tuple[int, ...]) -> None:
    assert _codes(fmt, 9, 200, layout).shape == codes
    assert _codes(fmt, 9, 200, layout).dtype == (torch.bfloat16 if layout == "values" else torch.uint8)
    assert _scales(fmt, 9, 200, layout).shape == scales


def test_aligned_rows() -> None:
    base = torch.zeros(4, 32, dtype=torch.bfloat16)
    assert aligned(base)
    assert aligned(base[:, 8:24])
    assert rows_aligned(base[:, 8:21])
    assert not aligned(base[:, 8:21])  # loads of 16 bytes would read what is not x
    assert not rows_aligned(base[:, 4:20])
    assert not rows_aligned(torch.zeros(4, 20, dtype=torch.bfloat16))
