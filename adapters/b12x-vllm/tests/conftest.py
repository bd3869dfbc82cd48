"""The tests build vLLM's own layers on a CPU, so the platform is chosen before any of them imports vLLM."""

from b12x_vllm.hooks.context import prepare

prepare("cpu")
