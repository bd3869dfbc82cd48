"""SGLang's scheduler and model in this process, for conformance of whole models.

SGLang's own `Engine` runs them in a process of their own and ends the caller's whole process tree when that one fails.
Here a fault surfaces where it happened, and what is counted is counted here. What is left out, tokenizer and
detokenizer processes, is met over HTTP.
"""

from __future__ import annotations

import array
import gc
import itertools
import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from b12x_core.adapters import Generation, TextEngine, TextEngineOptions
from b12x_core.environment import REFERENCE

from b12x_sglang.hooks.context import FLAGS, prepare
from b12x_sglang.hooks.linear import quantization_config

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

KV_CACHE_TOKENS = 16384
"""KV cache on a CPU, where SGLang would otherwise claim most of the machine's memory."""

_TOP_LOGPROBS = 5
_NEVER = 10.0**9


def arguments(options: TextEngineOptions) -> dict[str, Any]:
    """Server arguments of SGLang for the options, with every b12x flag set."""
    chosen: dict[str, Any] = {
        **FLAGS,
        "dtype": str(options.dtype).removeprefix("torch."),
        "context_length": options.max_model_len,
        "kv_cache_dtype": options.kv_dtype,
        "sampling_backend": "pytorch",
    }
    on_cpu = torch.device(options.device).type == "cpu"
    if on_cpu:
        chosen |= {"device": "cpu", "max_total_tokens": KV_CACHE_TOKENS, "max_running_requests": 16}
    if on_cpu or REFERENCE.enabled():
        # The reference reads lengths on the host, which a graph cannot record.
        chosen["disable_cuda_graph"] = True
    if options.max_num_batched_tokens is not None:
        chosen["chunked_prefill_size"] = options.max_num_batched_tokens
        chosen["enable_mixed_chunk"] = True
    if options.speculative_tokens:
        chosen |= {
            "speculative_algorithm": "NGRAM",
            # SGLang counts the token that is sure beside those that are proposed.
            "speculative_num_draft_tokens": options.speculative_tokens + 1,
            "speculative_ngram_max_bfs_breadth": 1,
        }
    return chosen


def cannot_express(options: TextEngineOptions, checkpoint: str | None) -> str | None:
    """Why SGLang itself cannot serve a checkpoint folder with these options, None if it can."""
    if options.speculative_tokens and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))):
        return "SGLang compiles its n-gram proposals when they are first asked for, and there is no C++ compiler"
    if checkpoint is None:
        return None
    config = json.loads(Path(checkpoint, "config.json").read_text())
    if "M" not in config.get("hybrid_override_pattern", "M"):
        return "SGLang plans the memory of a hybrid model by its Mamba layers, and this model has none"
    parsed = quantization_config(config.get("quantization_config"), {})
    if parsed is not None and torch.device(options.device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(options.device)
        if parsed.get_min_capability() > 10 * major + minor:
            return f"SGLang serves {parsed.get_name()} from capability {parsed.get_min_capability() / 10} on"
    return None


def start(checkpoint: str, options: TextEngineOptions) -> TextEngine:
    """Load a checkpoint folder; see `SglangEngine`."""
    return SglangEngine(checkpoint, options)


@dataclass
class _Answer:
    """What the scheduler has sent for one request."""

    tokens: list[int] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    finished: Mapping[str, Any] | None = None


class SglangEngine:
    """SGLang's `Scheduler`, fed and read in place of the processes that it talks to.

    One may be started after another was closed.

    Args:
        checkpoint: folder of the model. Prompts are token ids, so it needs no tokenizer.
        options: how it is served.
    """

    def __init__(self, checkpoint: str, options: TextEngineOptions) -> None:
        prepare(options.device)

        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        server_args = ServerArgs(
            model_path=checkpoint, skip_tokenizer_init=True, watchdog_timeout=_NEVER, **arguments(options)
        )
        self._answers: dict[str, _Answer] = {}
        self._names = map(str, itertools.count())
        self._scheduler: Any = None
        try:
            place = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=torch.device(options.device).index or 0)
            publish(server_args, role="scheduler", ranks=place)
            with _weak_watchdog():
                self._scheduler = Scheduler(server_args, PortArgs.init_new(server_args))
        except BaseException:
            self._release()
            raise
        self._scheduler.output_streamer.send_to_detokenizer = self

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generation]:
        """Continue all prompts in one batch, greedily, ignoring the end-of-sequence token."""
        answers = self._run([self._request(prompt, max_tokens=max_tokens) for prompt in prompts])
        return [Generation(tuple(answer.tokens), tuple(answer.top_logprobs)) for answer in answers]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, given those before it."""
        [answer] = self._run([self._request(token_ids, max_tokens=1, score_from=0)])
        # SGLang has no probability for the first token and says None.
        scores = [score for score in answer.input_logprobs if score is not None]
        if len(scores) != len(token_ids) - 1:
            raise RuntimeError(f"SGLang scored {len(scores)} of {len(token_ids) - 1} tokens")
        return scores

    def close(self) -> None:
        """Free the model and what SGLang keeps for the process."""
        if self._scheduler is not None:
            self._scheduler.release_host_resources()
            channels = self._scheduler.ipc_channels
            for name in ("recv_from_tokenizer", "recv_from_rpc"):
                getattr(channels, name).close(linger=0)
            for name in ("send_to_tokenizer", "send_to_detokenizer"):
                getattr(channels, name).socket.close(linger=0)
            self._scheduler = None
            self._release()

    def send_output(self, output: Any, recv_obj: object = None) -> None:
        """Take what the scheduler has for its detokenizer (called by SGLang), and end its loop with the last answer."""
        del recv_obj
        for index, name in enumerate(output.rids):
            answer = self._answers[name]
            answer.tokens += output.output_ids[index]
            answer.finished = output.finished_reasons[index]
            if output.input_token_logprobs_val and output.input_token_logprobs_val[index]:
                answer.input_logprobs += output.input_token_logprobs_val[index]
            if output.output_top_logprobs_val and output.output_top_logprobs_val[index]:
                steps = zip(output.output_top_logprobs_idx[index], output.output_top_logprobs_val[index], strict=True)
                answer.top_logprobs += [dict(zip(tokens, values, strict=True)) for tokens, values in steps]
        self._scheduler.gracefully_exit = all(answer.finished is not None for answer in self._answers.values())

    def _request(self, token_ids: Sequence[int], max_tokens: int, score_from: int = -1) -> TokenizedGenerateReqInput:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=next(self._names),
            input_text=None,
            input_ids=array.array("q", token_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=score_from,
            top_logprobs_num=_TOP_LOGPROBS,
            token_ids_logprob=None,
            stream=False,
        )

    def _run(self, requests: list[TokenizedGenerateReqInput]) -> list[_Answer]:
        if self._scheduler is None:
            raise RuntimeError("the engine is closed")
        self._answers = {str(request.rid): _Answer() for request in requests}
        self._scheduler.process_input_requests(requests)
        self._scheduler.gracefully_exit = False
        self._scheduler.run_event_loop()
        answers = list(self._answers.values())
        for answer in answers:
            if answer.finished is None or answer.finished.get("type") == "abort":
                raise RuntimeError(f"SGLang did not answer: {answer.finished}")
        return answers

    def _release(self) -> None:
        """Undo what SGLang leaves behind in the process, so that the next engine or layer does not meet it."""
        from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
        from sglang.srt.runtime_context import reset_context

        destroy_model_parallel()
        destroy_distributed_environment()
        reset_context()
        gc.collect()


@contextmanager
def _weak_watchdog() -> Iterator[None]:
    """Give the scheduler's watchdog, a thread that never ends, no hold on the scheduler and its model."""
    from sglang.srt.managers import scheduler as module

    create = module.create_scheduler_watchdog
    module.create_scheduler_watchdog = lambda scheduler, **options: create(weakref.proxy(scheduler), **options)
    try:
        yield
    finally:
        module.create_scheduler_watchdog = create
