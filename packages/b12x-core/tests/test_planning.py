"""Planning: every problem gets a kernel that can run it, on any number of multiprocessors."""

from __future__ import annotations

import itertools

import pytest
from b12x_core.ops._scratch import COUNTERS
from b12x_core.planning import inventory
from b12x_core.planning.kernel import KernelSpec
from b12x_core.planning.linear import TILE_ROWS
from b12x_core.planning.linear_plan import LinearProblem, checked_kernels, plan_linear
from b12x_core.planning.models import MODELS, MULTIPROCESSORS, TENSOR_PARALLEL, TOKENS, linear_shapes

TOKENS_AND_BETWEEN = sorted({*TOKENS, *(m + 1 for m in TOKENS), 5, 24, 48, 100, 200, 300, 777, 3000})
OPERANDS = sorted({operands for arch in inventory.ARCHITECTURES for operands in inventory.linear_operands(arch)})
SHAPES = [(1, 1), (17, 16), (160, 2560), (576, 576), (2880, 2880), (5120, 17408), (34816, 5120)]


@pytest.mark.parametrize(("weight", "activation", "scales"), OPERANDS)
@pytest.mark.parametrize("multiprocessors", [1, 2, 48, 78, 84, 132, 170, 188, 192])
def test_every_problem_has_a_plan(weight: str, activation: str, scales: str, multiprocessors: int) -> None:
    for (n, k), m in itertools.product(SHAPES, TOKENS_AND_BETWEEN):
        plan = plan_linear(LinearProblem(weight, activation, "fp32", scales, m, n, k), multiprocessors)
        config = plan.config
        assert (config.weight, config.activation, config.scales, config.out) == (weight, activation, scales, "fp32")
        assert config.rows % TILE_ROWS == 0 or TILE_ROWS % config.rows == 0
        assert config.rows % (16 * config.warps_n) == 0
        assert config.tokens % (8 * config.warps_t) == 0
        assert 1 <= plan.ctas <= 2 * multiprocessors
        # one counter for each tile that blocks may share
        token_tiles = -(-m // config.tokens)
        assert (plan.ctas * token_tiles if config.loop == "stream" else plan.ctas) <= COUNTERS
        assert plan.workspace >= 0


@pytest.mark.parametrize(
    ("m", "scales", "expected"), [(1, "end", 264), (16, "end", 264), (8, "block", 264), (16, "block", 132)]
)
def test_blocks_fill_multiprocessors_behind_a_kernel_that_quantizes(m: int, scales: str, expected: int) -> None:
    problem = LinearProblem("e4m3", "e4m3", "bf16", scales, m, 5120, 17408)
    assert plan_linear(problem, 132, 233_472).ctas == expected  # H200
    assert plan_linear(problem, 188, 102_400).ctas == 188  # RTX PRO 6000
    assert plan_linear(problem, 132, 233_472).workspace == 2 * expected * 64 * (8 if m <= 8 else 16)
    unquantized = LinearProblem("bf16", "bf16", "bf16", "end", m, 5120, 17408)
    assert plan_linear(unquantized, 132, 233_472).ctas == 132


@pytest.mark.parametrize("m", [8, 100])
def test_kernels_that_the_race_checker_can_follow_are_kernels_of_their_own(m: int) -> None:
    problem = LinearProblem("bf16", "bf16", "bf16", "end", m, 160, 2560)
    usual = plan_linear(problem, 188)
    with checked_kernels():
        checked = plan_linear(problem, 188)
    assert checked.config.name == f"{usual.config.name}-checked"
    assert plan_linear(problem, 188) == usual
    assert checked.ctas == usual.ctas


def test_names_are_unique() -> None:
    specs = inventory.everything()
    assert len({spec.name for spec in specs}) == len(specs)
    assert all(KernelSpec.from_json(spec.to_json()) == spec for spec in specs)


def test_the_representative_set_is_part_of_everything_and_has_each_loop_in_each_pair_of_operands() -> None:
    some = inventory.representative()
    assert set(some) <= set(inventory.everything())
    found = {
        (s.config.loop, s.config.weight, s.config.activation, s.config.scales) for s in some if "linear" in s.kernel
    }  # type: ignore[attr-defined]
    assert found == {(loop, *operands) for loop in ("stream", "tiled") for operands in OPERANDS}


def test_shapes_divide_among_gpus() -> None:
    gpt_oss = next(model for model in MODELS if model.name == "gpt-oss")
    assert list(gpt_oss.linears(1)) == [(5120, 2880), (2880, 4096)]
    assert list(gpt_oss.linears(8)) == [(640, 2880), (2880, 512)]
    mimo = next(model for model in MODELS if model.name == "MiMo-V2-Flash")
    assert next(mimo.linears(4)) == (16 * 192 + 1 * (192 + 128), 4096)
    assert len(linear_shapes()) == len(set(linear_shapes())) > 100
    assert set(MULTIPROCESSORS) >= {48, 170, 188}
    assert TENSOR_PARALLEL == (1, 2, 4, 8)
