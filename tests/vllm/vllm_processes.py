"""vLLM in its own environment: where that is, a server of it, a script in it. Always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashdraft.external.versions import VLLM
from flashdraft.models.files.packaged import cache_folder

VERSION = VLLM.known
STAMP = ".stamp"  # in an environment that is complete
START_S = 240.0
STOP_S = 60.0  # a command that ends vLLM in turn needs some time
ROOT = Path(__file__).parents[2]
# a small cache, two threads, no pinning to cores that others use, nothing fetched or reported
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "VLLM_NO_USAGE_STATS": "1",
}


def environment_folder() -> Path:
    """Where `make test-vllm` makes an environment with vLLM."""
    return cache_folder().parent / f"vllm-{VERSION}"


def find_python() -> Path | None:
    """Its interpreter, if it is there and complete."""
    python = environment_folder() / "bin" / "python"
    return python if python.exists() and (environment_folder() / STAMP).exists() else None


def environment(**changes: str) -> dict[str, str]:
    """What a vLLM process sees; without VLLM_PLUGINS every installed plugin is loaded."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VLLM_PLUGINS")}
    return {**kept, **SETTINGS, **changes}


def run_python(
    python: Path, arguments: Sequence[str], timeout_s: float, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a script or `-c` text there; its whole group is gone when this returns."""
    process = subprocess.Popen(
        [str(python), *arguments],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        stop(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def stop(process: subprocess.Popen[Any]) -> None:
    """Ask the process to end, and then see to it that its group has."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Server:
    """A server that answers."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's JSON; an error's has a `status`."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=180) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            return {"status": error.code, "error": error.read().decode(errors="replace")}


@contextlib.contextmanager
def serving(command: Sequence[str], url: str, log: Path, **changes: str) -> Iterator[Server]:
    """Start a command, wait until its /health is good, and stop it with all its children."""
    with log.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            list(command),
            env=environment(**changes),
            cwd=ROOT,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, url, log)
            yield Server(url, log)
        finally:
            stop(process)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(process: subprocess.Popen[Any], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(1)
    tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    raise AssertionError(f"no answer at {url} (exit status {process.poll()}):\n{tail}")
