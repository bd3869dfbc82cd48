"""Registration with SGLang: once, all of it, or one line that says why not."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import b12x_sglang
import pytest
from b12x_core import UnsupportedError
from b12x_sglang import hooking, models
from b12x_sglang.hooks.context import FLAGS, layer_context

SMALL = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 256}


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process that has not registered yet; lists the kinds as they register."""
    calls: list[str] = []
    monkeypatch.setattr(b12x_sglang, "_done", False)
    for kind in b12x_sglang.KINDS:
        monkeypatch.setattr(f"b12x_sglang.{kind}.register", lambda kind=kind: calls.append(kind))
    return calls


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sglang.b12x"]


def test_entry_point_is_found_and_registers_everything_once(
    unregistered: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    [point] = [p for p in importlib.metadata.entry_points(group="sglang.srt.plugins") if p.name == "b12x"]
    point.load()()
    point.load()()
    assert unregistered == list(b12x_sglang.KINDS)
    assert lines(caplog) == []


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23rc1", "0.5.23.post1", "0.6.0.dev3"])
def test_another_engine_version_is_left_alone_with_one_line(
    version: str, unregistered: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    b12x_sglang.register()
    assert unregistered == []
    [line] = lines(caplog)
    assert version in line
    assert "==0.5.23" in line
    assert "--moe-runner-backend b12x" in line


def test_missing_kernels_are_one_line(
    unregistered: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "b12x_core"]:
        monkeypatch.setitem(sys.modules, name, None)
    b12x_sglang.register()
    assert unregistered == []
    [line] = lines(caplog)
    assert "pip install b12x-core" in line


def test_a_kind_that_cannot_be_imported_keeps_all_from_registering(
    unregistered: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "b12x_sglang.moe", None)
    b12x_sglang.register()
    assert unregistered == []
    [line] = lines(caplog)
    assert "b12x_sglang.moe" in line


def test_hooks_import_nothing_of_the_engine() -> None:
    code = "import sys, b12x_sglang.hooks as h; print(h.HOOKS.b12x_adapter_info(), 'sglang' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("False")
    assert "name='sglang'" in result.stdout


def checkpoint(folder: Path, architecture: str, model_type: str, **values: object) -> str:
    """A folder with the configuration of a model; no weights."""
    config = {"architectures": [architecture], "model_type": model_type, **SMALL, **values}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128, "layer_types": ["full_attention"]}


@pytest.mark.parametrize("alone", [None, *FLAGS])
def test_flags_are_offered_and_resolve(alone: str | None, tmp_path: Path) -> None:
    """Each alone, and all together, by the command line."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import create_context, use_context
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    flags = {name: name.replace("_gemm_runner_", "_gemm_").replace("_", "-") for name in FLAGS}
    chosen = [alone] if alone else list(FLAGS)
    argv = ["--model-path", checkpoint(tmp_path, "LlamaForCausalLM", "llama"), "--device", "cpu"]
    for name in chosen:
        argv += [f"--{flags[name]}", "b12x"]
    with use_context(create_context(prepare_server_args(argv), role="scheduler")) as context:
        kernel, moe = context.config_bag("exec").kernel, context.config_bag("exec").moe
        resolved = {
            "attention_backend": kernel.attention_backend,
            "fp8_gemm_runner_backend": kernel.fp8_gemm_runner_backend,
            "fp4_gemm_runner_backend": kernel.fp4_gemm_runner_backend,
            "moe_runner_backend": moe.moe_runner_backend,
        }
    assert [name for name, value in resolved.items() if value == "b12x"] == chosen


@pytest.mark.parametrize(
    ("architecture", "model_type", "values"),
    [("GptOssForCausalLM", "gpt_oss", GPT_OSS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_list_of_names_is_opened(
    architecture: str, model_type: str, values: dict[str, object], tmp_path: Path
) -> None:
    import torch

    folder = checkpoint(tmp_path, architecture, model_type, **values)
    with layer_context(torch.bfloat16, "cpu", model_path=folder) as server_args:
        assert server_args.attention_backend == "b12x"
    # For any other name the list stays what it is.
    with (
        pytest.raises(AssertionError, match="requires one of"),
        layer_context(torch.bfloat16, "cpu", model_path=folder, attention_backend="torch_native"),
    ):
        pass


@pytest.mark.parametrize(("architecture", "seen"), [("GptOssForCausalLM", "triton"), ("LlamaForCausalLM", "b12x")])
def test_another_name_stands_in_for_listed_architectures_and_while_they_are_checked(
    architecture: str, seen: str, tmp_path: Path
) -> None:
    """Lfm2, for one, asserts that the backend is not the one whose name stands in for b12x."""
    import torch
    from sglang.srt.arg_groups import model_hook

    def backend(server_args: object) -> str:
        return str(model_hook.resolved_view(server_args).attention_backend)

    assert "Lfm2ForCausalLM" not in models.ARCHITECTURES
    model_type = "gpt_oss" if architecture in models.ARCHITECTURES else "llama"
    folder = checkpoint(tmp_path, architecture, model_type, **(GPT_OSS if model_type == "gpt_oss" else {}))
    during: list[str] = []
    with layer_context(torch.bfloat16, "cpu", model_path=folder) as server_args:
        models._adjust(lambda arguments: during.append(backend(arguments)), server_args)
        assert (during, backend(server_args)) == ([seen], "b12x")


@pytest.mark.parametrize(("flag", "chosen"), [("b12x", "MixtralForCausalLM"), ("auto", "QuantMixtralForCausalLM")])
def test_experts_of_a_quantized_mixtral_are_fused_where_the_flag_asks(flag: str, chosen: str, tmp_path: Path) -> None:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.utils import get_model_architecture

    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "quantization_config": quantization}
    folder = checkpoint(tmp_path, "MixtralForCausalLM", "mixtral", **experts)
    with layer_context(torch.bfloat16, "cpu", moe_runner_backend=flag):
        assert get_model_architecture(ModelConfig(folder))[1] == chosen


@pytest.mark.parametrize("flag", FLAGS)
def test_a_hook_that_sglang_could_not_apply_ends_the_start_up(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    none = dict.fromkeys(FLAGS, "auto") | {"attention_backend": "torch_native"}
    for target in hooking._targets:
        monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
        with (
            pytest.raises(UnsupportedError, match=target),
            layer_context(torch.bfloat16, "cpu", **(none | {flag: "b12x"})),
        ):
            pass
        with layer_context(torch.bfloat16, "cpu", **none):
            pass
        monkeypatch.undo()
