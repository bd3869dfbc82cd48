"""The `b12x` command: what this machine and this installation can serve."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, field
from typing import Annotated

import torch
import typer
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

from b12x_core import environment, runtime
from b12x_core.adapters import GROUP, Adapter
from b12x_core.capabilities import Tier, support_table, tier_of
from b12x_core.planning.inventory import everything
from b12x_core.planning.kernel import KernelSpec
from b12x_core.runtime.devices import ARCHITECTURES

app = typer.Typer(no_args_is_help=True, add_completion=False, help="b12x: quantized inference kernels.")
console = Console()


@dataclass
class Report:
    """What `b12x doctor` found. `problems` are sentences; serving works if there is none."""

    versions: dict[str, str | None] = field(default_factory=dict)
    devices: list[dict[str, str]] = field(default_factory=list)
    adapters: list[dict[str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(report: Report) -> None:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        tier, where = tier_of(device)
        properties = torch.cuda.get_device_properties(device)
        missing = [row for row in support_table() if tier is None or row.kernels[tier] is None]
        serves = "nothing" if tier is None else f"{tier.value} tier"
        report.devices.append(
            {
                "device": f"cuda:{index} {properties.name}",
                "memory": f"{properties.total_memory / 2**30:.0f} GiB",
                "serves": f"{serves} ({where})",
            }
        )
        if missing:
            report.problems.append(
                f"cuda:{index}: {len(missing)} of {len(support_table())} rows of `b12x support` have no kernel on "
                f"{where}; B12X_REFERENCE=1 serves them in plain torch, slowly"
            )
    if not report.devices:
        report.problems.append("no CUDA device is visible: only the plain torch reference runs here")
    report.devices.append({"device": f"cpu {platform.processor() or platform.machine()}", "serves": "reference tier"})


def _adapters(report: Report) -> None:
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            info = Adapter(point.name, point.load()).info
        except Exception as error:
            report.problems.append(f"adapter {point.name}: cannot be loaded: {type(error).__name__}: {error}")
            continue
        fits = info.installed is not None and SpecifierSet(info.serves).contains(info.installed, prereleases=True)
        report.adapters.append(
            {"adapter": info.name, "engine": f"{info.engine} {info.installed or 'missing'}", "serves": info.serves}
        )
        if not fits:
            report.problems.append(
                f"adapter {info.name}: serves {info.engine} {info.serves}; installed is {info.installed or 'none'}"
            )
    if not report.adapters:
        report.problems.append("no engine adapter is installed: pip install b12x-vllm")


def diagnose() -> Report:
    """Look at versions, devices, adapters and variables."""
    report = Report()
    for distribution in ("b12x-core", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        report.versions[distribution] = _version(distribution)
    report.versions["python"] = platform.python_version()
    _devices(report)
    _adapters(report)
    report.environment = {variable.name: variable.get() for variable in environment.VARIABLES if variable.get()}
    return report


def _table(title: str, rows: list[dict[str, str]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in columns))
    console.print(table)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Say what would serve a model here, and what stands in the way. Exit code 1 if anything does."""
    report = diagnose()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        versions = report.versions.items()
        _table("Versions", [{"package": name, "version": version or "not installed"} for name, version in versions])
        _table("Devices", report.devices)
        _table("Adapters", report.adapters)
        _table("Environment", [{"variable": name, "value": value} for name, value in report.environment.items()])
        for problem in report.problems:
            console.print(f"[red]problem:[/red] {problem}", highlight=False)
        if not report.problems:
            console.print("[green]nothing stands in the way[/green]")
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def support() -> None:
    """Print what runs where: every op in every scheme, and the kernel that serves it on each tier."""
    rows = [
        {"op": row.op.value, "scheme": row.scheme} | {tier.value: row.kernels[tier] or "-" for tier in Tier}
        for row in support_table()
    ]
    _table("Support", rows)
    for tier in Tier:
        console.print(f"{tier.value}: {tier.targets}", highlight=False)


@app.command("compile")
def compile_kernels(
    arch: Annotated[list[str], typer.Option(help="Architecture to compile for: sm_90a, sm_120a or sm_121a.")],
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel, in the words of the error that misses it.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every kernel that planning can choose for known models.")
    ] = False,
    keep: Annotated[bool, typer.Option(help="Keep PTX, cubin and object file beside each kernel.")] = False,
) -> None:
    """Compile kernels into the cache (B12X_CACHE_DIR), without a GPU. What is there already is not compiled again."""
    unknown = set(arch) - set(ARCHITECTURES.values())
    if unknown:
        raise typer.BadParameter(f"--arch {', '.join(sorted(unknown))}: there are {', '.join(ARCHITECTURES.values())}")
    specs = [KernelSpec.from_json(text) for text in kernel or ()]
    if not specs and not every:
        raise typer.BadParameter("name kernels with --kernel, or give --all")
    for target in arch:
        done = runtime.compile_all(specs + (everything(target) if every else []), target, keep=keep)
        console.print(f"{target}: {len(done.compiled)} compiled, {len(done.present)} were there", highlight=False)


if __name__ == "__main__":
    app()
