"""Gates, refusals and the support table."""

from __future__ import annotations

import pytest
import torch
from b12x_core import SCHEMES, SILU, Scheme, capabilities, supports_attention, supports_linear, supports_moe
from b12x_core.capabilities import Op, Tier, support_table, tier_of

BF16, FP16 = torch.bfloat16, torch.float16


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "tier"),
    [((12, 0), Tier.NATIVE), ((12, 1), Tier.NATIVE), ((9, 0), Tier.PORTABLE), ((8, 9), None), ((10, 0), None)],
)
def test_tiers(no_environment: pytest.MonkeyPatch, capability: tuple[int, int], tier: Tier | None) -> None:
    device = fake_gpu(no_environment, capability)
    assert tier_of(device) == (tier, f"compute capability {capability[0]}.{capability[1]}")
    no_environment.setenv("B12X_REFERENCE", "1")
    assert tier_of(device)[0] is Tier.REFERENCE


def test_a_missing_kernel_is_refused_with_what_there_is(no_environment: pytest.MonkeyPatch) -> None:
    device = fake_gpu(no_environment, (12, 1))
    no_environment.setattr(capabilities, "KERNELS", [k for k in capabilities.KERNELS if k.tier is Tier.REFERENCE])
    support = supports_linear(Scheme.parse("nvfp4-w4a4"), 128, 128, device)
    assert not support.ok
    assert support.kernel is None
    assert support.reason == (
        "no linear kernel for nvfp4-w4a4 on compute capability 12.1; this version has it on: reference "
        "(B12X_REFERENCE=1 runs plain torch on any device)"
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_served_on_a_cpu(name: str) -> None:
    scheme = SCHEMES[name]
    assert supports_linear(scheme, 1, 576, "cpu").kernel == "reference.linear"
    assert supports_moe(scheme, 8, 576, 160, SILU, "cpu").kernel == "reference.fused_moe"


@pytest.mark.parametrize(
    ("scheme", "k", "multiple"),
    [("nvfp4-w4a16", 24, 16), ("nvfp4-w4a8", 48, 32), ("mxfp4-w4a4", 48, 32), ("mxfp8", 33, 32)],
)
def test_k_follows_from_the_blocks(scheme: str, k: int, multiple: int) -> None:
    reason = supports_linear(Scheme.parse(scheme), 16, k, "cpu").reason
    assert reason == f"{scheme} needs K to be a multiple of {multiple}, the block that shares a scale; got {k}"


def test_moe_names_the_size_that_does_not_fit() -> None:
    scheme = Scheme.parse("mxfp4-w4a16")
    assert "the hidden size" in str(supports_moe(scheme, 8, 48, 64, SILU, "cpu").reason)
    assert "the intermediate size" in str(supports_moe(scheme, 8, 64, 48, SILU, "cpu").reason)
    assert "num_experts must be at least 1" in str(supports_moe(scheme, 0, 64, 64, SILU, "cpu").reason)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head_dim": 20}, "head_dim must be a multiple of 8 from 16 to 512; got 20"),
        ({"v_head_dim": 1024}, "v_head_dim must be a multiple of 8 from 16 to 512; got 1024"),
        ({"page_size": 0}, "page_size must be at least 1 token; got 0"),
        ({"q_dtype": torch.float32}, "queries must be bfloat16 or float16; got float32"),
        (
            {"kv_dtype": FP16},
            "a KV cache beside bfloat16 queries holds bfloat16, float8_e4m3fn, float8_e5m2; got float16",
        ),
        ({"kv_dtype": torch.uint8}, "got uint8"),
    ],
    ids=str,
)
def test_attention_refusals(change: dict[str, object], sentence: str) -> None:
    arguments = {"head_dim": 64, "page_size": 16, "q_dtype": BF16, "kv_dtype": BF16, "device": "cpu"}
    assert supports_attention(**arguments).ok  # type: ignore[arg-type]
    assert sentence in str(supports_attention(**(arguments | change)).reason)  # type: ignore[arg-type]


def test_the_table_says_what_the_gates_say(no_environment: pytest.MonkeyPatch) -> None:
    for row in support_table():
        for tier, device in ((Tier.REFERENCE, torch.device("cpu")), (Tier.NATIVE, fake_gpu(no_environment, (12, 0)))):
            assert capabilities.find(row.op, row.scheme, device).kernel == row.kernels[tier]
    assert {row.op for row in support_table()} == set(Op)
