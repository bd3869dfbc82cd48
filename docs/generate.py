"""Writes the generated parts of the documentation; `--check` only says whether they are current.

A generated part stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->` in a Markdown file. A name like
`path/file.py::Class.method` stands for that piece of source, `path/file.toml::table` for a table of that file,
`path/file.json::SCHEME` for the rows of a benchmark's record, `path/file.json::loops` for those of main loops.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from b12x_core.capabilities import Op, Tier, support_table
from b12x_core.environment import VARIABLES, Variable
from b12x_core.formats import ALL, SCHEMES, Format

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    *("README.md", "docs/support.md", "docs/environment.md", "docs/add-an-engine.md"),
    *("docs/performance/linear.md", "docs/performance/loops.md"),
)
MARKED = re.compile(r"(<!-- begin: (?P<name>.+?) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)
# Read as files: the tables must not depend on an engine being installed.
VARIABLE_MODULES = {"b12x-conformance": "conformance/src/b12x_conformance/environment.py"}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def words(fmt: Format) -> str:
    """How a format stores a matrix."""
    if fmt.scale is None or fmt.block is None:
        return fmt.element.value
    spans = {(ALL, ALL): "tensor", (1, ALL): "row"}
    rows, columns = fmt.block
    span = spans.get(fmt.block) or (f"{columns} of K" if rows == 1 else f"{rows} x {columns}")
    return f"{fmt.element.value}, {fmt.scale.value} per {span}" + (", fp32 global" if fmt.global_scale else "")


def support(ops: tuple[Op, ...]) -> str:
    """The support table of some ops: a scheme a row, an op on a tier a column."""
    schemes = list(dict.fromkeys(row.scheme for row in support_table() if row.op in ops))
    served = {(row.op, row.scheme): row.kernels for row in support_table()}
    rows = []
    for name in schemes:
        cells = [f"`{name}`"]
        if name in SCHEMES and Op.LINEAR in ops:
            cells += [words(SCHEMES[name].weight), words(SCHEMES[name].activation)]
        cells += ["yes" if served[op, name][tier] else "not yet" for op in ops for tier in Tier]
        rows.append(cells)
    storage = ["weight", "activation"] if Op.LINEAR in ops else []
    columns = [f"{op.value}, {tier.value}" for op in ops for tier in Tier]
    return table(["scheme" if storage else "cache", *storage, *columns], rows)


def tiers() -> str:
    """The tiers and their devices."""
    return table(["tier", "devices"], [[tier.value, tier.targets] for tier in Tier])


def environment() -> str:
    """Every B12X_* variable of every package."""
    variables: list[tuple[str, Variable]] = [("b12x-core", variable) for variable in VARIABLES]
    for package, path in VARIABLE_MODULES.items():
        spec = importlib.util.spec_from_file_location("variables", ROOT / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        variables += [(package, variable) for variable in module.VARIABLES]
    rows = [[f"`{v.name}`", package, f"`{v.default}`" if v.default else "unset", v.meaning] for package, v in variables]
    return table(["variable", "read by", "default", "meaning"], rows)


def excerpt(path: str, name: str) -> str:
    """A definition of a Python file, or a table of a TOML file, as a block of code."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    if path.endswith(".toml"):
        first = lines.index(f"[{name}]")
        last = lines.index("", first) if "" in lines[first:] else len(lines)
    else:
        node: ast.AST = ast.parse(text)
        for part in name.split("."):
            node = next(child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        first = min(line.lineno for line in (node, *node.decorator_list)) - 1
        last = node.end_lineno or len(lines)
    language = {".py": "python", ".toml": "toml"}[Path(path).suffix]
    return f"```{language}\n" + textwrap.dedent("\n".join(lines[first:last])) + "\n```"


def machine(path: str) -> str:
    """Where and with what the record of a benchmark was made, and the ceilings measured beside it."""
    record = json.loads((ROOT / path).read_text())
    rows = [["GPU", record["gpu"]], ["driver", record["driver"]], ["date", record["date"]]]
    rows += [[name, str(value)] for name, value in record["versions"].items()]
    rows += [[f"ceiling, {name}", f"{value:,.0f}"] for name, value in record["ceilings"].items()]
    return table(["", ""], rows)


def benchmark(path: str, scheme: str) -> str:
    """The rows of one scheme of the record of a benchmark: time, fractions of the ceilings, the fastest peer."""
    record = json.loads((ROOT / path).read_text())
    rows = []
    for row in record["rows"]:
        if row["scheme"] != scheme:
            continue
        peer = min(row["peers"], key=lambda name: row["peers"][name], default=None)
        shape = row["shape"]
        rows.append(
            [
                f"{shape['n']} x {shape['k']}",
                str(shape["m"]),
                shape["input"],
                f"{row['us']:.1f}",
                f"{row['read_fraction']:.0%}",
                f"{row['mma_fraction']:.0%}",
                "-" if peer is None else f"{row['peers'][peer] / row['us']:.2f}x",
                peer or "-",
                f"{row['error']:.1e}",
            ]
        )
    header = [
        "N x K",
        "M",
        "input",
        "us",
        "of the floor",
        "of the mma rate",
        "speed-up",
        "over the fastest peer",
        "error",
    ]
    return table(header, rows)


def loops(path: str) -> str:
    """What the main loops of kernels issue, from the record of `benchmarks/upstream_loops.py`."""
    record = json.loads((ROOT / path).read_text())
    rows = []
    for row in record["rows"]:
        each = row["per_matrix"]
        rows.append(
            [
                row["format"],
                str(row["m"]),
                row["by"],
                f"`{row['name']}`",
                " ".join(f"{count} {name.partition('.')[0]}" for name, count in row["matrix"].items()),
                f"{each['ldmatrix']:.2f}",
                f"{each['shared']:.2f}",
                f"{each['integer'] + each['uniform']:.2f}",
                f"{each['conversion'] + each['float']:.2f}",
                f"{each['synchronization'] + each['global'] + each['other']:.2f}",
                f"{row['issue_bound']:.1f}",
                f"{row['shared_bound']:.1f}",
                str(row["registers"]),
                f"{row['shared'] / 1024:.0f} KiB",
                str(row["stages"]),
                f"{row['blocks']} x {row['threads']}",
            ]
        )
    header = [
        *("format", "M", "by", "kernel", "an iteration", "ldmatrix", "shared", "integer", "float", "other"),
        *("issue", "width", "registers", "memory", "stages", "blocks"),
    ]
    return table(header, rows)


PARTS: dict[str, Callable[[], str]] = {
    "support": lambda: support((Op.LINEAR, Op.MOE)),
    "kv-support": lambda: support((Op.ATTENTION, Op.KV_CACHE)),
    "tiers": tiers,
    "environment": environment,
}


def current(name: str) -> str:
    """What a generated part should say."""
    if name in PARTS:
        return PARTS[name]()
    path, _, definition = name.partition("::")
    if definition == "loops":
        return loops(path)
    if path.endswith(".json"):
        return benchmark(path, definition) if definition else machine(path)
    return excerpt(path, definition)


def main() -> int:
    """Rewrite or check the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name in FILES:
        path = ROOT / name
        old = path.read_text()
        new = MARKED.sub(lambda match: f"{match[1]}\n{current(match['name'])}\n\n{match[3]}", old)
        if new != old:
            stale.append(name)
            if not check:
                path.write_text(new)
    if stale and check:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
