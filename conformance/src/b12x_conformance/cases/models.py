"""Cases of whole models: which checkpoint, served how, and how near to the truth it must come."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from b12x_core.adapters import TextEngineOptions

from b12x_conformance import data
from b12x_conformance.checkpoints import moe, quantized, random_models, smollm2


@dataclass(frozen=True)
class Tolerance:
    """How far an engine may be from the truth.

    Attributes:
        reason: what the engine cannot help doing otherwise than the truth.
        near_tie: the greedy text must agree up to a gap of this many logits; None: texts are not comparable.
        deviation: mean absolute difference of log-probabilities of the text's tokens.
        perplexity: relative difference of the text's perplexity.
        parting: how sure two engines may be, in log-probability, where their greedy texts part: at most twice what
            each may be from the truth. None: not comparable.
    """

    reason: str
    near_tie: float | None
    deviation: float
    perplexity: float
    parting: float | None


# Texts are compared in fp16: the noise of bf16 over 30 layers moves the gap between two logits by 0.05 and more, which
# is what counts as a near tie. With fp16 it is an eighth of that, so a text that parts anywhere else is wrong.
FP16 = TextEngineOptions(dtype=torch.float16)
TEXT = Tolerance("fp16 where the truth has fp32", 0.05, 0.02, 0.01, 0.1)
WEIGHT_ONLY = Tolerance("bf16 where the truth has fp32: 0.017 measured in SmolLM2", None, 0.05, 0.01, 0.3)

# A rounding step of an activation is large, and whether a value that lies near a tie is rounded up or down depends on
# the last bit of what came before. Over 30 layers those decisions lose all memory: noise of 1e-5 in the layers' outputs
# moves log-probabilities of SmolLM2 by 0.11 on average with e4m3 activations and by 0.43 with e2m1. That is as far as
# two right implementations are apart, so greedy texts part where the truth sees more than a near tie (0.65 logits is
# the widest gap measured with e4m3), and averages are what can be compared closely. The same checkpoints with their
# activations left alone must give the text.
E4M3_TEXT = Tolerance("e4m3 activations near a tie round either way: 0.09 measured in SmolLM2", 1.0, 0.25, 0.01, 1.0)
E4M3_ACTIVATIONS = Tolerance(
    "e4m3 activations near a tie round either way: 0.11 measured in SmolLM2", None, 0.25, 0.03, 1.0
)
E2M1_ACTIVATIONS = Tolerance(
    "e2m1 activations near a tie round either way: 0.43 measured in SmolLM2", None, 0.9, 0.12, None
)

# Scales that are powers of two leave e2m1 with larger steps: less of the model is left, and rounding moves it more.
MXFP4_TEXT = Tolerance("fp16 where the truth has fp32: 0.12 logits measured in SmolLM2", 0.2, 0.02, 0.01, 0.4)
MXFP4_ACTIVATIONS = Tolerance(
    "e2m1 activations near a tie round either way: 0.85 measured in SmolLM2", None, 1.4, 0.2, None
)

RANDOM = Tolerance("bf16 where the truth has fp32, and routers at a tie, in layers that amplify", None, 0.3, 0.1, 0.5)

LONG_TEXT = 4000
"""More tokens than the text has: all of it."""

PASSAGE = 1024
"""Tokens of the text that are scored as one sequence. In plain torch, attention to more costs more than all else."""


@dataclass(frozen=True)
class ModelProblem:
    """A checkpoint and how it is served.

    Attributes:
        id: of the test.
        checkpoint: makes the folder.
        served: counters that must have counted, "<op>/<scheme>". Other schemes for the same kind of weight must not.
        tolerance: how near to the truth.
        tokens: greedy tokens a prompt.
        text_tokens: tokens of the text that are scored.
        options: how it is served.
        equivalent: schemes that may have served in addition, because they lose nothing.
        force_a16: with `B12X_FORCE_A16=1`; the truth then leaves activations alone too.
        random: prompts and text are random tokens.
    """

    id: str
    checkpoint: Callable[[], Path]
    served: tuple[str, ...]
    tolerance: Tolerance
    tokens: int = 6
    text_tokens: int = 256
    options: TextEngineOptions = field(default_factory=TextEngineOptions)
    equivalent: tuple[str, ...] = ()
    force_a16: bool = False
    random: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts."""
        return random_models.random_prompts() if self.random else _questions()

    @property
    def passages(self) -> list[list[int]]:
        """Token ids of the passages to score, each by itself."""
        if self.random:
            return random_models.random_prompts((self.text_tokens,), seed=1)
        text = _text()[: self.text_tokens]
        return [text[first : first + PASSAGE] for first in range(0, len(text), PASSAGE)]


@functools.cache
def _questions() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.bf16())
    chats = [[{"role": "user", "content": prompt}] for prompt in data.PROMPTS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


@functools.cache
def _text() -> list[int]:
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(smollm2.bf16())(data.text()).input_ids
    return tokens


def _dense(kind: str) -> Callable[[], Path]:
    return functools.partial(quantized.smollm2_quantized, kind)


def _experts(kind: str) -> Callable[[], Path]:
    return functools.partial(moe.smollm2_moe, kind)


def _random(name: str) -> Callable[[], Path]:
    return functools.partial(random_models.random_model, name)


def _activations_left_alone(
    name: str, checkpoint: Callable[[], Path], served: str, tolerance: Tolerance
) -> ModelProblem:
    """A checkpoint of quantized activations with these in 16 bits, so that its text can be compared closely."""
    return ModelProblem(
        f"{name}-16-bit-activations", checkpoint, (served,), tolerance, tokens=32, options=FP16, force_a16=True
    )


_FP4 = ("linear/nvfp4-w4a16",)
_FULL: dict[str, Any] = {"tokens": 32, "text_tokens": LONG_TEXT}

PROBLEMS: tuple[ModelProblem, ...] = (
    ModelProblem("nvfp4-dense", _dense("modelopt-nvfp4-w4a16"), _FP4, TEXT, options=FP16, **_FULL),
    ModelProblem("nvfp4-dense-bf16", _dense("modelopt-nvfp4-w4a16"), _FP4, WEIGHT_ONLY),
    ModelProblem(
        "nvfp4-dense-chunked-prefill",
        _dense("modelopt-nvfp4-w4a16"),
        _FP4,
        TEXT,
        options=replace(FP16, max_num_batched_tokens=48),
    ),
    ModelProblem(
        "nvfp4-dense-speculation",
        _dense("modelopt-nvfp4-w4a16"),
        _FP4,
        TEXT,
        tokens=16,
        options=replace(FP16, speculative_tokens=3),
    ),
    ModelProblem(
        "nvfp4-dense-fp8-kv",
        _dense("modelopt-nvfp4-w4a16"),
        (*_FP4, "paged_attention/float8_e4m3fn", "write_kv_cache/float8_e4m3fn"),
        E4M3_ACTIVATIONS,
        options=TextEngineOptions(kv_dtype="fp8_e4m3"),
    ),
    ModelProblem(
        "nvfp4-moe", _experts("modelopt-nvfp4-w4a16"), (*_FP4, "fused_moe/nvfp4-w4a16"), TEXT, options=FP16, **_FULL
    ),
    ModelProblem("fp8-block-dense", _dense("fp8-block"), ("linear/fp8-block",), E4M3_TEXT, options=FP16, **_FULL),
    _activations_left_alone("fp8-block-dense", _dense("fp8-block"), "linear/fp8-block-w8a16", TEXT),
    ModelProblem("nvfp4-w4a4-dense", _dense("modelopt-nvfp4"), ("linear/nvfp4-w4a4",), E2M1_ACTIVATIONS),
    _activations_left_alone("nvfp4-w4a4-dense", _dense("modelopt-nvfp4"), "linear/nvfp4-w4a16", TEXT),
    ModelProblem("nvfp4-w4a4-moe", _experts("modelopt-nvfp4"), ("fused_moe/nvfp4-w4a4",), E2M1_ACTIVATIONS),
    _activations_left_alone("nvfp4-w4a4-moe", _experts("modelopt-nvfp4"), "fused_moe/nvfp4-w4a16", TEXT),
    ModelProblem("compressed-nvfp4-dense", _dense("compressed-nvfp4"), ("linear/nvfp4-w4a4",), E2M1_ACTIVATIONS),
    _activations_left_alone("compressed-nvfp4-dense", _dense("compressed-nvfp4"), "linear/nvfp4-w4a16", TEXT),
    ModelProblem("mxfp4-dense", _dense("compressed-mxfp4"), ("linear/mxfp4-w4a4",), MXFP4_ACTIVATIONS),
    _activations_left_alone("mxfp4-dense", _dense("compressed-mxfp4"), "linear/mxfp4-w4a16", MXFP4_TEXT),
    ModelProblem("mxfp4-w4a16-dense", _dense("compressed-mxfp4-w4a16"), ("linear/mxfp4-w4a16",), WEIGHT_ONLY),
    ModelProblem("mxfp4-moe", _experts("compressed-mxfp4-w4a16"), ("fused_moe/mxfp4-w4a16",), WEIGHT_ONLY),
    ModelProblem("fp8-channel-dense", _dense("compressed-fp8-channel"), ("linear/fp8-channel",), E4M3_ACTIVATIONS),
    ModelProblem(
        "fp8-tensor-dense",
        _dense("fp8-tensor"),
        ("linear/fp8-tensor",),
        E4M3_ACTIVATIONS,
        # Scales of fused projections, one of each, kept as a scale for each row.
        equivalent=("linear/fp8-channel-tensor",),
    ),
    ModelProblem("fp8-block-moe", _experts("fp8-block"), ("fused_moe/fp8-block",), E4M3_ACTIVATIONS),
    ModelProblem("mxfp8-dense", _dense("modelopt-mxfp8"), ("linear/mxfp8",), E4M3_ACTIVATIONS),
    ModelProblem("random-gpt-oss", _random("gpt-oss"), ("fused_moe/mxfp4-w4a16",), RANDOM, random=True),
    ModelProblem(
        "random-qwen3-moe", _random("qwen3-moe"), ("linear/nvfp4-w4a16", "fused_moe/nvfp4-w4a16"), RANDOM, random=True
    ),
    ModelProblem("random-gemma2", _random("gemma2"), ("linear/nvfp4-w4a16",), RANDOM, random=True),
    ModelProblem(
        "random-nemotron", _random("nemotron"), ("linear/nvfp4-w4a16", "fused_moe/nvfp4-w4a16"), RANDOM, random=True
    ),
)
