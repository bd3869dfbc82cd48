"""vLLM's engine in this process, for conformance of whole models."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from b12x_core.adapter_support import restored_environment
from b12x_core.adapters import Generation, TextEngine, TextEngineOptions
from b12x_core.environment import REFERENCE

if TYPE_CHECKING:
    from vllm import LLM

KV_CACHE_BYTES = 512 << 20
"""KV cache on a CPU, where vLLM would otherwise claim most of the machine's memory."""

_TOP_LOGPROBS = 5


def arguments(options: TextEngineOptions) -> dict[str, Any]:
    """Engine arguments of vLLM for the options, with every b12x flag set."""
    chosen: dict[str, Any] = {
        "attention_backend": "B12X",
        "linear_backend": "b12x",
        "moe_backend": "b12x",
        "dtype": str(options.dtype).removeprefix("torch."),
        "max_model_len": options.max_model_len,
        "kv_cache_dtype": options.kv_dtype,
    }
    on_cpu = torch.device(options.device).type == "cpu"
    if on_cpu:
        chosen["kv_cache_memory_bytes"] = KV_CACHE_BYTES
    if on_cpu or REFERENCE.enabled():
        # The reference reads lengths on the host, which neither a graph nor a traced model can record.
        chosen["enforce_eager"] = True
    if options.max_num_batched_tokens is not None:
        chosen["max_num_batched_tokens"] = options.max_num_batched_tokens
    if options.speculative_tokens:
        chosen["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": options.speculative_tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
        }
    return chosen


def start(checkpoint: str, options: TextEngineOptions) -> TextEngine:
    """Load a checkpoint folder; see `VllmEngine`."""
    return VllmEngine(checkpoint, options)


class VllmEngine:
    """vLLM's `LLM` with engine core and worker in this process, so that faults surface here and memory is freed here.

    One may be started after another was closed.

    Args:
        checkpoint: folder of the model. Prompts are token ids, so it needs no tokenizer.
        options: how it is served.
    """

    def __init__(self, checkpoint: str, options: TextEngineOptions) -> None:
        self._set_num_threads = torch.set_num_threads
        self._llm: LLM | None = None
        try:
            with restored_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"):
                from vllm import LLM

                self._llm = LLM(model=checkpoint, skip_tokenizer_init=True, **arguments(options))
        except BaseException:
            self._release()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generation]:
        """Continue all prompts in one batch, greedily, ignoring the end-of-sequence token."""
        results = self._run(prompts, max_tokens=max_tokens, ignore_eos=True, logprobs=_TOP_LOGPROBS)
        generations = []
        for result in results:
            completion = result.outputs[0]
            candidates = tuple({token: entry.logprob for token, entry in step.items()} for step in completion.logprobs)
            generations.append(Generation(tuple(completion.token_ids), candidates))
        return generations

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, given those before it."""
        [result] = self._run([token_ids], max_tokens=1, prompt_logprobs=0)
        # vLLM has no probability for the first token and says None.
        steps = zip(token_ids[1:], result.prompt_logprobs[1:], strict=True)
        return [step[token].logprob for token, step in steps]

    def close(self) -> None:
        """Free the model and what vLLM keeps for the process."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            self._release()

    def _release(self) -> None:
        """Undo what vLLM leaves behind in the process, so that the next engine or layer does not meet it."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.v1.worker.workspace import reset_workspace_manager

        # Groups depend on the model: one without experts has no group for them, and a later one would be missing it.
        cleanup_dist_env_and_memory()
        # Locked at the size that this model needed.
        reset_workspace_manager()
        # vLLM's CPU worker disables it for good.
        torch.set_num_threads = self._set_num_threads
        gc.collect()

    def _run(self, prompts: Sequence[Sequence[int]], **parameters: Any) -> list[Any]:
        if self._llm is None:
            raise RuntimeError("the engine is closed")
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, detokenize=False, **parameters)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return list(self._llm.generate(requests, sampling, use_tqdm=False))
