"""What SGLang's layers expect around them, without an engine: plug-ins, published arguments, a place in the topology.

Everything here may be entered while no engine exists, while one runs, or after one was closed, in any order.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from b12x_core import UnsupportedError

from b12x_sglang.flags import FLAG

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

FLAGS: dict[str, str] = {
    "attention_backend": FLAG,
    "fp8_gemm_runner_backend": FLAG,
    "fp4_gemm_runner_backend": FLAG,
    "moe_runner_backend": FLAG,
}
"""The flags of b12x, as SGLang names their fields."""

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def prepare(device: str) -> None:
    """Make this process ready for SGLang layers on a device: the engine for it chosen, plug-ins loaded.

    Args:
        device: "cpu", "cuda" or "cuda:<index>".

    Raises:
        UnsupportedError: SGLang cannot run on such a device in this process.
    """
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu != (os.environ.get(CPU_ENGINE) == "1"):
        remedy = (
            f"install b12x-conformance and call b12x_conformance.sglang_cpu.activate() first, which sets {CPU_ENGINE}=1"
            if on_cpu
            else f"unset {CPU_ENGINE}"
        )
        raise UnsupportedError(f"SGLang cannot run on {device} in this process: {remedy}")
    from sglang.srt.plugins import load_plugins

    load_plugins()


@contextmanager
def layer_context(
    dtype: torch.dtype, device: str, *, rank: int = 0, ranks: int = 1, **arguments: Any
) -> Iterator[ServerArgs]:
    """Published arguments under which SGLang layers can be built and run outside an engine, with every b12x flag set.

    Inside, the default dtype and device are the given ones, as they are while SGLang loads a model. What was published
    before is back afterwards.

    Args:
        dtype: torch.bfloat16 or torch.float16, of activations.
        device: where the layers live.
        rank, ranks: place of this process among ranks that share the experts (and nothing else). No group is formed,
            so nothing may communicate; whoever builds the layers of all ranks adds up their results.
        **arguments: fields of SGLang's `ServerArgs` that replace the ones chosen here.

    Yields:
        The published `ServerArgs`.
    """
    prepare(device)

    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import ServerArgs

    chosen = {
        "model_path": str(small_model()),
        "device": torch.device(device).type,
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "tp_size": ranks,
        "ep_size": ranks,
        **FLAGS,
        **arguments,
    }
    server_args = ServerArgs(**chosen)
    place = SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=torch.device(device).index or 0)
    default = torch.get_default_dtype()
    with use_context(create_context(server_args, role="scheduler", ranks=place)), torch.device(device):
        torch.set_default_dtype(dtype)
        try:
            initialize_moe_config()
            initialize_fp8_gemm_config()
            initialize_fp4_gemm_config()
            yield server_args
        finally:
            torch.set_default_dtype(default)


@functools.cache
def small_model() -> Path:
    """Folder with the configuration of a model, which SGLang reads before it looks at any layer. No layer is of it."""
    folder = Path(tempfile.mkdtemp(prefix="b12x-sglang-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
