"""`python -m b12x_conformance.demo vllm`: a real model, served by a real engine through b12x, answers a question."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from b12x_core import environment
from b12x_core.adapters import Adapter, TextEngineOptions, discover
from b12x_core.capabilities import Op, find
from b12x_core.counters import Count
from rich.console import Console
from rich.table import Table

from b12x_conformance import serving, sglang_cpu
from b12x_conformance.checkpoints.moe import smollm2_moe
from b12x_conformance.environment import CPU

QUESTION = "Why is the sky blue? Answer in a few sentences."
CHECKPOINT = "modelopt-nvfp4-w4a16"
console = Console()


def _options() -> TextEngineOptions:
    """Serve on the GPU if there is one. Where it has no kernel yet, plain torch runs there, and that is said."""
    if not torch.cuda.is_available():
        os.environ.setdefault(CPU.name, "1")
        sglang_cpu.activate()
        console.print("No CUDA device is visible: the engine runs on the CPU, on b12x's plain torch reference.")
        return TextEngineOptions(max_model_len=1024)
    console.print(f"GPU: {torch.cuda.get_device_name()}.")
    support = find(Op.MOE, "nvfp4-w4a16", "cuda")
    if not support.ok:
        console.print(f"{support.reason}: set for this demo.")
        os.environ[environment.REFERENCE.name] = "1"
    return TextEngineOptions(max_model_len=1024, device="cuda")


def _ask(server: serving.Server, question: str, max_tokens: int) -> str:
    answer = ""
    stream = server.client().chat.completions.create(
        model=server.model(),
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            console.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
            answer += piece
    console.print()
    return answer


def _report(served: dict[str, Count]) -> None:
    table = Table(
        "b12x op / scheme", "layers", "calls", title="What b12x served, as counted in the server", min_width=50
    )
    for key, count in served.items():
        table.add_row(key, str(count["layers"]), str(count["calls"]))
    console.print(table)


def _find(engine: str) -> Adapter:
    try:
        return discover([engine])[engine]
    except LookupError as error:
        console.print(f"[red]{error}[/red]\nInstall it first: pip install b12x-{engine}")
        raise typer.Exit(2) from None


def main(
    engine: Annotated[str, typer.Argument(help="The adapter to serve with.")] = "vllm",
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 80,
    checkpoint: Annotated[str, typer.Option(help="Format of the model, as b12x_conformance names it.")] = CHECKPOINT,
    output: Annotated[Path | None, typer.Option(help="Folder for the server's log and counts.")] = None,
) -> None:
    """Make a checkpoint, serve it with every b12x flag, ask a question, and say which op served what."""
    folder = output or Path(tempfile.mkdtemp(prefix="b12x-demo-"))
    adapter = _find(engine)
    console.rule(f"b12x demo: {adapter.info.engine} {adapter.info.installed}")
    console.print(f"Step 1 of 3: SmolLM2-135M-Instruct as a mixture of experts in {checkpoint}")
    model = smollm2_moe(checkpoint)
    console.print(f"             {model}")
    console.print(f"Step 2 of 3: start the server; its log is {folder / 'server.log'}")
    options = _options()
    command = adapter.server_command(str(model), 8000, options)
    console.print(f"             {' '.join(command.argv)}", highlight=False, soft_wrap=True)
    try:
        with console.status("starting (importing an engine takes a minute)") as status:

            def progress(line: str) -> None:
                status.update(f"starting: {line[: max(20, console.width - 14)]}")

            with serving.serve(adapter, model, folder, options, progress) as server:
                status.stop()
                console.print(f"Step 3 of 3: ask over the OpenAI API at {server.url}\n")
                console.print(f"[bold]question:[/bold] {question}\n[bold]answer:[/bold]   ", end="")
                answer = _ask(server, question, max_tokens)
                served = server.served()
    except serving.ServerError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        console.print(
            f"\nThe whole log is {folder / 'server.log'}. `b12x doctor` says what stands in the way; "
            f"{environment.REFERENCE.name}=1 rules the kernels out as the cause."
        )
        raise typer.Exit(1) from None
    console.print()
    _report(served)
    missing = [
        op for op in ("linear/", "fused_moe/", "paged_attention/") if not any(key.startswith(op) for key in served)
    ]
    if missing or not answer.strip():
        console.print(f"[red]The demo failed: no answer, or b12x did not serve {', '.join(missing)}[/red]")
        raise typer.Exit(1)
    console.print("[green]Served by b12x; the server is stopped.[/green]")


if __name__ == "__main__":
    sys.exit(typer.run(main))
