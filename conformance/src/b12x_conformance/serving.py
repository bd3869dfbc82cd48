"""Starting an engine's OpenAI-compatible server through its adapter, and talking to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from b12x_core import counters
from b12x_core.adapters import Adapter, TextEngineOptions
from b12x_core.counters import Count
from openai import OpenAI

START_SECONDS = 600
STOP_SECONDS = 30
LOG_LINES = 40


class ServerError(RuntimeError):
    """The server did not start or died; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: base of the OpenAI API, ending in /v1.
        log: file with the server's output.
        stats: folder where its processes count their calls of the b12x ops.
    """

    url: str
    log: Path
    stats: Path

    def client(self) -> OpenAI:
        """A client of the server. The key is a formality; the server is on the loopback address."""
        return OpenAI(base_url=self.url, api_key="none", timeout=START_SECONDS, max_retries=0)

    def model(self) -> str:
        """Name of the model that is served."""
        return self.client().models.list().data[0].id

    def served(self) -> dict[str, Count]:
        """Calls of the b12x ops so far, over all processes of the server."""
        time.sleep(3 * counters.FLUSH_SECONDS)  # the processes write what they count now and then
        return counters.collect(self.stats)


def free_port() -> int:
    """A TCP port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _wait(process: subprocess.Popen[bytes], health: str, log: Path, progress: Callable[[str], None]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with exit code {process.returncode} before it was ready\n{_tail(log)}")
        try:
            if httpx.get(health, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        lines = log.read_text(errors="replace").splitlines()
        progress(lines[-1] if lines else "")
        time.sleep(0.5)
    raise ServerError(f"the server was not ready after {START_SECONDS} s\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and every process it started: they share its process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    # The group outlives its leader where a worker ignores signals.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def serve(
    adapter: Adapter,
    checkpoint: Path,
    folder: Path,
    options: TextEngineOptions,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Server]:
    """Serve a checkpoint until the block ends.

    Args:
        adapter: whose engine serves.
        checkpoint: model folder.
        folder: where the log and the counts go.
        options: how the model is served.
        progress: called about twice a second while the server starts, with the last line of its log.

    Raises:
        ServerError: the server did not become ready.
    """
    port = free_port()
    command = adapter.server_command(str(checkpoint), port, options)
    folder.mkdir(parents=True, exist_ok=True)
    log, stats = folder / "server.log", folder / "stats"
    stats.mkdir(exist_ok=True)
    # On a CPU, threads that wait by spinning take the cores from the server's other processes: 50 times slower.
    environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | dict(command.environment) | {"B12X_STATS": str(stats)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}{command.health}", log, progress)
        yield Server(f"http://127.0.0.1:{port}/v1", log, stats)
    finally:
        _stop(process)
