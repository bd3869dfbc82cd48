"""`python -m b12x_conformance.mutations TESTS`: does the suite notice a wrong reference?

Each mutation is one small edit of the core, of the kind that a kernel gets wrong. It is made in a copy that shadows
the installed package, and the layer tests of the `core` adapter must then fail; the first test that does is printed.
A mutation that survives is a hole in the suite.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import b12x_core
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

console = Console()
LAYER_TESTS = ("test_attention_layers.py", "test_linear_layers.py", "test_moe_layers.py")


@dataclass(frozen=True)
class Mutation:
    """One edit: in `file` of the core, the only occurrence of `old` becomes `new`."""

    name: str
    file: str
    old: str
    new: str


CODECS, QUANTIZE, LINEAR = "reference/codecs.py", "reference/quantize.py", "reference/linear.py"
MOE, ATTENTION, CACHE = "reference/moe.py", "reference/attention.py", "reference/kv_cache.py"
PROJECTIONS = "projections.py"

MUTATIONS = (
    Mutation(
        "nibbles swapped",
        CODECS,
        "(signed[codes & 15], signed[codes >> 4])",
        "(signed[codes >> 4], signed[codes & 15])",
    ),
    Mutation("e2m1 ties to odd", CODECS, "if upper % 2 == 0", "if upper % 2 == 1"),
    Mutation(
        "FP8 range of the fnuz code",
        CODECS,
        "values.clamp(-element.largest, element.largest)",
        "values.clamp(-240, 240)",
    ),
    Mutation("e8m0 rounds down", CODECS, "torch.where(mantissa == 0.5, exponent - 1, exponent)", "exponent - 1"),
    Mutation("e8m0 bias off by one", CODECS, "power + 127", "power + 126"),
    Mutation("division by a scale of 0", QUANTIZE, "torch.where(scale == 0, 0.0, values / scale)", "values / scale"),
    Mutation("block rows counted from the end", QUANTIZE, "[..., :rows, :]", "[..., -rows:, :]"),
    Mutation("edge of K counted from the end", QUANTIZE, "dim=-1)[..., :k]\n\n", "dim=-1)[..., -k:]\n\n"),
    Mutation("activations not quantized", QUANTIZE, "if not fmt.quantized:", "if True:"),
    Mutation(
        "fused shards take the largest scale",
        LINEAR,
        "return global_scale.float().unsqueeze(-1)",
        "return global_scale.amax()",
    ),
    Mutation(
        "projections take the largest scale",
        PROJECTIONS,
        "scales.repeat_interleave(counts, output_size=sum(rows))",
        "scales.amax().repeat(sum(rows))",
    ),
    Mutation(
        "gate and up take the larger scale",
        PROJECTIONS,
        "scales.repeat(1, each) if interleaved else scales.repeat_interleave(each, dim=1)",
        "scales.amax(1, keepdim=True).repeat(1, rows)",
    ),
    Mutation(
        "scales of gate and up exchanged",
        PROJECTIONS,
        "else scales.repeat_interleave(each, dim=1)",
        "else scales.flip(1).repeat_interleave(each, dim=1)",
    ),
    Mutation("bias dropped", LINEAR, "y = y + bias.float()", "pass"),
    Mutation("clamp of the gate dropped", MOE, "gate.clamp(max=activation.limit)", "gate"),
    Mutation(
        "clamp of the up projection one-sided",
        MOE,
        "up.clamp(-activation.limit, activation.limit)",
        "up.clamp(max=activation.limit)",
    ),
    Mutation("gate and up exchanged", MOE, "(h[:, 0::2], h[:, 1::2])", "(h[:, 1::2], h[:, 0::2])"),
    Mutation("alpha ignored", MOE, "torch.sigmoid(activation.alpha * gate)", "torch.sigmoid(gate)"),
    Mutation(
        "global expert ids taken for local", MOE, "expert_map.long()[ids.clamp(min=0)]", "ids % w13.weight.shape[0]"
    ),
    Mutation("sentinel taken for expert 0", MOE, "ids = topk_ids.long()", "ids = topk_ids.long().clamp(min=0)"),
    Mutation("expert bias dropped", MOE, "return y if self.bias is None else", "return y if True else"),
    Mutation(
        "routed weight always on the output", MOE, "out if router_weight_on_input else out * weight", "out * weight"
    ),
    Mutation("window off by one", ATTENTION, "(key > query - window)", "(key >= query - window)"),
    Mutation("last key hidden", ATTENTION, "key <= query if causal", "key < query if causal"),
    Mutation("sinks ignored", ATTENTION, "if sinks is not None:", "if False:"),
    Mutation("soft cap ignored", ATTENTION, "if soft_cap is not None:", "if False:"),
    Mutation("softmax scale fixed", ATTENTION, "keys) * scale", "keys) * q.shape[2] ** -0.5"),
    Mutation(
        "cache scales ignored", ATTENTION, "tokens if scale is None else tokens *", "tokens if True else tokens *"
    ),
    Mutation(
        "query groups transposed",
        ATTENTION,
        "unflatten(1, (kv_heads, group))",
        "unflatten(1, (group, kv_heads)).transpose(1, 2)",
    ),
    Mutation("padding slot written", CACHE, "live = slot_mapping >= 0", "live = slot_mapping >= -1"),
    Mutation("cache write not scaled", CACHE, "if scale is None else divide(", "if True else divide("),
)


def _run(mutation: Mutation, tests: Path) -> str | None:
    """The first test that fails under a mutation, None if none does."""
    with tempfile.TemporaryDirectory(prefix="b12x-mutation-") as folder:
        package = Path(folder) / "b12x_core"
        shutil.copytree(Path(b12x_core.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / mutation.file
        source = path.read_text()
        if source.count(mutation.old) != 1:
            raise typer.BadParameter(f"{mutation.name}: {mutation.old!r} stands {source.count(mutation.old)} times")
        path.write_text(source.replace(mutation.old, mutation.new))
        environment = os.environ | {"PYTHONPATH": folder}
        where = subprocess.run(
            [sys.executable, "-c", "import b12x_core; print(b12x_core.__file__)"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not where.startswith(folder):
            raise typer.BadParameter(f"the copy does not shadow the installed core at {where}")
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "--no-header",
                "--tb=no",
                "-p",
                "no:cacheprovider",
                "--adapter=core",
            ]
            + [str(tests / name) for name in LAYER_TESTS],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r"^(?:FAILED|ERROR) (?:.*?::)?(.*?)(?: - .*)?$", result.stdout, re.MULTILINE)
        if found is None and result.returncode not in (0, 1):
            raise typer.BadParameter(f"{mutation.name}: pytest ended with {result.returncode}\n{result.stdout[-2000:]}")
        return found[1] if found else None


def main(
    tests: Annotated[Path, typer.Argument(help="Folder of the conformance tests.")],
    only: Annotated[str, typer.Option(help="Only mutations whose name contains this.")] = "",
) -> None:
    """Try every mutation; exit code 1 if one survives."""
    table = Table("mutation", "caught by")
    survivors = []
    for mutation in track([m for m in MUTATIONS if only in m.name], "mutating", console=console):
        caught = _run(mutation, tests)
        table.add_row(mutation.name, caught or "[red]survived[/red]")
        console.print(f"{mutation.name}: {caught or 'SURVIVED'}", highlight=False, markup=False)
        if caught is None:
            survivors.append(mutation.name)
    console.print(table)
    raise typer.Exit(1 if survivors else 0)


if __name__ == "__main__":
    typer.run(main)
