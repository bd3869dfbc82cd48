"""Scales of single projections, kept exactly in the weights of the layer that fuses them.

Scales are powers of two and values e4m3 or e2m1, so that the expected products hold without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from b12x_core import (
    FP8_ROW,
    FP8_TENSOR,
    SCHEMES,
    ArgumentError,
    ExpertWeights,
    LinearWeights,
    Scheme,
    expert_scale_per_row,
    fused_moe,
    linear,
    lost_block_scales,
    prepare_expert_projections,
    prepare_experts,
    prepare_linear,
    prepare_projections,
    scale_per_row,
)
from b12x_core.reference.quantize import dequantize
from conftest import stored_weight

K = 64
ROWS = (16, 4, 12)
SCALES = (1.0, 0.125, 4.0)
TENSOR, CHANNEL = SCHEMES["fp8-tensor-w8a16"], SCHEMES["fp8-channel-w8a16"]


def fp8(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(torch.float8_e4m3fn)


def dense(weight: torch.Tensor, rows: Sequence[int], scales: Sequence[float]) -> torch.Tensor:
    """What the projections' weights stand for, one by one."""
    parts = zip(weight.float().split(list(rows)), scales, strict=True)
    return torch.cat([part * scale for part, scale in parts])


def columns(weights: LinearWeights) -> torch.Tensor:
    """The weight that prepared weights stand for, read back through the op."""
    return linear(torch.eye(weights.k, dtype=torch.bfloat16), weights).T.float()


def nvfp4(rows: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    data, scale, global_scale, _ = stored_weight(SCHEMES["nvfp4-w4a16"], torch.randn(rows, K) * size)
    assert scale is not None
    assert global_scale is not None
    return data, scale, global_scale


def test_scale_per_row() -> None:
    assert scale_per_row(torch.tensor([1.0, 2.0, 3.0]), [2, 0, 1]).tolist() == [1, 1, 3]
    with pytest.raises(ArgumentError, match=r"scales must be of shape \(2,\), one a projection; got float32 \(3,\)"):
        scale_per_row(torch.ones(3), [1, 1])


def test_expert_scale_per_row() -> None:
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert expert_scale_per_row(scales, 4, interleaved=False).tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
    assert expert_scale_per_row(scales, 4, interleaved=True).tolist() == [[1, 2, 1, 2], [3, 4, 3, 4]]
    for wrong, rows in ((scales, 5), (scales[0], 4), (scales[:, :0], 4)):
        with pytest.raises(ArgumentError, match=r"\(E, P\) where P divides"):
            expert_scale_per_row(wrong, rows, interleaved=False)


@pytest.mark.parametrize(
    ("rows", "ranks", "lost"),
    [
        ([128, 64], 1, False),
        ([128, 64], 2, True),
        ([64, 128], 1, True),
        ([128, 128], 4, False),
        ([96], 4, False),
    ],
)
def test_lost_block_scales(rows: list[int], ranks: int, lost: bool) -> None:
    sentence = lost_block_scales("Engine", rows, ranks)
    assert (sentence is not None) == lost
    if sentence is not None:
        assert f"Engine cannot load block scales of fused projections with {rows} rows" in sentence


class TestLinear:
    def test_unequal_fp8_scales_are_kept(self) -> None:
        weight = fp8(sum(ROWS), K)
        prepared = prepare_projections(TENSOR, ROWS, weight, torch.tensor(SCALES), bias=torch.zeros(sum(ROWS)))
        assert prepared.scheme == CHANNEL
        assert torch.equal(columns(prepared), dense(weight, ROWS, SCALES))

    def test_activations_keep_their_format(self) -> None:
        weight, scales = fp8(sum(ROWS), K), torch.tensor(SCALES)
        static = prepare_projections(
            Scheme(FP8_TENSOR, FP8_TENSOR), ROWS, weight, scales, input_scale=torch.tensor([0.25, 0.5, 0.125])
        )
        assert static.scheme.name == "fp8-channel-tensor"
        assert static.input_scale is not None
        assert static.input_scale.tolist() == [0.5]
        token = prepare_projections(Scheme(FP8_TENSOR, FP8_ROW), ROWS, weight, scales)
        assert token.scheme.name == "fp8-channel"

    def test_equal_scales_have_the_form_of_unequal_ones_and_are_filled_again(self) -> None:
        weight, other = fp8(sum(ROWS), K), fp8(sum(ROWS), K)
        first = prepare_projections(TENSOR, ROWS, weight.clone(), torch.ones(3))
        assert first.scheme == CHANNEL
        assert first.scale is not None
        held = first.weight.data_ptr(), first.scale.data_ptr()
        again = prepare_projections(TENSOR, ROWS, other, torch.tensor(SCALES), into=first)
        assert again is first
        assert (first.weight.data_ptr(), first.scale.data_ptr()) == held
        assert torch.equal(columns(first), dense(other, ROWS, SCALES))
        prepare_projections(TENSOR, ROWS, other, torch.tensor(2.0), into=first)
        assert torch.equal(columns(first), other.float() * 2)

    @pytest.mark.parametrize("shape", [(), (1,)])
    @pytest.mark.parametrize("rows", [ROWS, (sum(ROWS),)], ids=["fused", "plain"])
    def test_one_scale_stays_one(self, rows: Sequence[int], shape: tuple[int, ...]) -> None:
        weight = fp8(sum(ROWS), K)
        prepared = prepare_projections(TENSOR, rows, weight, torch.full(shape, 0.5))
        assert prepared.scheme == TENSOR
        assert torch.equal(columns(prepared), weight.float() * 0.5)

    def test_unequal_global_scales_are_kept(self) -> None:
        parts = [nvfp4(rows, size) for rows, size in zip(ROWS, (1.0, 1e-3, 50.0), strict=True)]
        scheme = SCHEMES["nvfp4-w4a16"]
        weight, scale = (torch.cat([part[index] for part in parts]) for index in (0, 1))
        scales = torch.cat([part[2] for part in parts])
        fused = prepare_projections(scheme, ROWS, weight, scale, global_scale=scales)
        each = [prepare_linear(scheme, part[0], part[1], global_scale=part[2]) for part in parts]
        assert fused.scheme == scheme
        assert torch.equal(columns(fused), torch.cat([columns(one) for one in each]))
        by_row = prepare_projections(scheme, ROWS, weight, scale, global_scale=scale_per_row(scales, ROWS))
        assert torch.equal(columns(by_row), columns(fused))

    def test_the_largest_input_scale_is_shared(self) -> None:
        data, scale, global_scale = nvfp4(8)
        prepared = prepare_projections(
            SCHEMES["nvfp4-w4a4"],
            [4, 4],
            data,
            scale,
            global_scale=global_scale,
            input_scale=torch.tensor([0.25, 2.0]),
        )
        assert prepared.global_scale is global_scale
        assert prepared.input_scale is not None
        assert prepared.input_scale.tolist() == [2.0]

    def test_sixteen_bit_activations_on_request(self, no_environment: pytest.MonkeyPatch) -> None:
        no_environment.setenv("B12X_FORCE_A16", "1")
        prepared = prepare_projections(
            Scheme(FP8_TENSOR, FP8_TENSOR), ROWS, fp8(sum(ROWS), K), torch.tensor(SCALES), input_scale=torch.ones(3)
        )
        assert prepared.scheme == CHANNEL
        assert prepared.input_scale is None

    def test_other_formats_pass_through(self) -> None:
        scheme = SCHEMES["fp8-channel-w8a16"]
        weight, scale = fp8(sum(ROWS), K), torch.rand(sum(ROWS), 1)
        prepared = prepare_projections(scheme, ROWS, weight, scale)
        assert torch.equal(columns(prepared), columns(prepare_linear(scheme, weight, scale)))
        plain = prepare_projections(SCHEMES["bf16"], ROWS, torch.ones(sum(ROWS), K, dtype=torch.bfloat16))
        assert plain.scale is None

    @pytest.mark.parametrize("argument", ["scale", "input_scale", "rows"])
    def test_what_does_not_fit_is_named(self, argument: str) -> None:
        given = {"scale": torch.ones(3), "input_scale": torch.ones(3), "rows": ROWS}
        given[argument] = torch.ones(2) if argument != "rows" else (1, 2, 3)
        rows, scale = given.pop("rows"), given.pop("scale")
        with pytest.raises(ArgumentError, match=f"prepare_projections: {argument} must"):
            prepare_projections(Scheme(FP8_TENSOR, FP8_TENSOR), rows, fp8(sum(ROWS), K), scale, **given)

    def test_a_number_of_global_scales_that_does_not_fit_is_named(self) -> None:
        data, scale, _ = nvfp4(8)
        with pytest.raises(ArgumentError, match=r"global_scale must be of one value or of shape \(2,\)"):
            prepare_projections(SCHEMES["nvfp4-w4a16"], [4, 4], data, scale, global_scale=torch.ones(3))


E, H, INTERMEDIATE = 3, 32, 16
UNEQUAL = torch.tensor([[1.0, 0.125], [0.5, 4.0], [2.0, 2.0]])
DOWN = torch.tensor([0.5, 0.25, 1.0])


def run(experts: ExpertWeights) -> torch.Tensor:
    """Every expert on the same tokens: (E, M, H)."""
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(7)).bfloat16()
    ones = torch.ones(5, 1)
    ids = [torch.full((5, 1), expert) for expert in range(E)]
    return torch.stack([fused_moe(x, experts, ones, chosen) for chosen in ids])


class TestExperts:
    @pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
    def test_unequal_fp8_scales_are_kept(self, gate_up: str) -> None:
        w13, w2 = fp8(E, 2 * INTERMEDIATE, H), fp8(E, H, INTERMEDIATE)
        prepared = prepare_expert_projections(TENSOR, w13, UNEQUAL, w2, DOWN, gate_up=gate_up)
        assert prepared.scheme == CHANNEL
        each = w13.float().clone()
        for expert in range(E):
            for part in range(2):
                start = INTERMEDIATE * part
                rows = slice(start, start + INTERMEDIATE) if gate_up == "halves" else slice(part, None, 2)
                each[expert, rows] *= UNEQUAL[expert, part]
        assert torch.equal(dequantize(prepared.w13, FP8_ROW, prepared.w13_scale), each)
        assert torch.equal(dequantize(prepared.w2, FP8_ROW, prepared.w2_scale), w2.float() * DOWN[:, None, None])
        plain = prepare_experts(
            SCHEMES["bf16"], each.bfloat16(), None, (w2.float() * DOWN[:, None, None]).bfloat16(), None, gate_up=gate_up
        )
        assert torch.equal(run(prepared), run(plain))

    def test_equal_fp8_scales_stay_one_an_expert(self) -> None:
        w13, w2 = fp8(E, 2 * INTERMEDIATE, H), fp8(E, H, INTERMEDIATE)
        equal = UNEQUAL[:, :1].expand(E, 2)
        for scale in (equal, equal[:, 0], equal[:, :1]):
            prepared = prepare_expert_projections(TENSOR, w13, scale, w2, DOWN)
            assert prepared.scheme == TENSOR
            assert prepared.w13_scale is not None
            assert prepared.w13_scale.tolist() == UNEQUAL[:, 0].tolist()

    def test_equal_scales_are_filled_into_the_form_of_unequal_ones(self) -> None:
        w13, w2 = fp8(E, 2 * INTERMEDIATE, H), fp8(E, H, INTERMEDIATE)
        first = prepare_expert_projections(TENSOR, w13.clone(), UNEQUAL, w2.clone(), DOWN)
        equal = UNEQUAL[:, :1].expand(E, 2)
        fresh = prepare_expert_projections(TENSOR, w13, equal, w2, DOWN)
        assert prepare_expert_projections(TENSOR, w13, equal, w2, DOWN, into=first) is first
        assert torch.equal(run(first), run(fresh))
        with pytest.raises(ArgumentError, match="into must hold weights of the same scheme"):
            prepare_expert_projections(TENSOR, w13, UNEQUAL, w2, DOWN, into=fresh)

    @pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
    def test_unequal_global_scales_are_kept(self, gate_up: str) -> None:
        w13, w2 = (torch.randint(0, 256, (E, rows, k // 2), dtype=torch.uint8) for rows, k in ((32, H), (H, 16)))
        s13, s2 = (torch.ones(E, rows, k // 16).to(torch.float8_e4m3fn) for rows, k in ((32, H), (H, 16)))
        prepared = prepare_expert_projections(
            SCHEMES["nvfp4-w4a4"],
            w13,
            s13,
            w2,
            s2,
            w13_global_scale=UNEQUAL,
            w2_global_scale=DOWN,
            w13_input_scale=UNEQUAL,
            w2_input_scale=DOWN,
            gate_up=gate_up,
        )
        assert prepared.w13_global_scale is not None
        for expert in range(E):
            gate, up = UNEQUAL[expert].tolist()
            rows = [gate] * 16 + [up] * 16 if gate_up == "halves" else [gate, up] * 16
            assert prepared.w13_global_scale[expert].tolist() == rows
        assert prepared.w13_input_scale is not None
        assert prepared.w13_input_scale.tolist() == [1.0, 4.0, 2.0]

    def test_experts_without_a_gate_have_one_projection(self) -> None:
        w13, w2 = fp8(E, INTERMEDIATE, H), fp8(E, H, INTERMEDIATE)
        prepared = prepare_expert_projections(TENSOR, w13, DOWN[:, None], w2, DOWN)
        assert prepared.scheme == TENSOR
        with pytest.raises(ArgumentError, match=r"w13_scale must be of shape \(E,\) or \(E, 1\)"):
            prepare_expert_projections(TENSOR, w13, UNEQUAL, w2, DOWN)

    def test_sixteen_bit_activations_on_request(self, no_environment: pytest.MonkeyPatch) -> None:
        no_environment.setenv("B12X_FORCE_A16", "1")
        prepared = prepare_expert_projections(
            Scheme(FP8_TENSOR, FP8_TENSOR),
            fp8(E, 2 * INTERMEDIATE, H),
            UNEQUAL,
            fp8(E, H, INTERMEDIATE),
            DOWN,
            w13_input_scale=UNEQUAL,
            w2_input_scale=DOWN,
        )
        assert prepared.scheme == CHANNEL
        assert prepared.w13_input_scale is None
        assert prepared.w2_input_scale is None
