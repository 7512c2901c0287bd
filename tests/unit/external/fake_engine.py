"""An engine for tests: an interpreter that says it has vLLM or SGLang, and a server that obeys.

    python = make_engine(tmp_path, "vllm", "0.32.0")
    arguments = [str(python), "-m", "vllm.entrypoints.cli.main", "--port", "0", "--fake", "crash"]

The interpreter is the real one with a folder before its others, which holds the engine's metadata,
a `torch` that sees the GPUs it was told of, and the server. The server starts a child of its own,
writes down what it was told, answers /health, and behaves as `--fake` says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MODULES = {"vllm": "vllm.entrypoints.cli.main", "sglang": "sglang.launch_server"}

_SERVER = """
import http.server, json, os, signal, subprocess, sys, time

def flag(name, default):  # the last one counts, as in the real parsers
    found = [at for at, word in enumerate(sys.argv) if word == name]
    return sys.argv[found[-1] + 1] if found else default

how = flag("--fake", "serve")
ignore = "import signal, time; print(1, flush=True); time.sleep(100)"
if how != "slow":  # its child is a polite one
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + ignore
child = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
child.stdout.readline()
pids = [os.getpid(), child.pid]
if how == "stray":  # a grandchild that has left, and holds on to the output
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2, "
    start += "start_new_session=True).pid)"
    away = [sys.executable, "-c", start, sys.executable, "-c", ignore]
    pids.append(int(subprocess.run(away, stdout=subprocess.PIPE).stdout))
with open(os.environ["FAKE_RECORD"] + ".part", "w") as file:
    keep = ("VLLM_API_KEY", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    json.dump({"argv": sys.argv[1:], "pids": pids, **environment}, file)
os.replace(os.environ["FAKE_RECORD"] + ".part", os.environ["FAKE_RECORD"])
print("fake engine: loading", flush=True)
if how == "crash":
    print("(Core pid=1) ValueError: no room for the cache", file=sys.stderr)
    print("RuntimeError: Engine core initialization failed. See above.", file=sys.stderr)
    sys.exit(3)
if how == "refuse":
    print("pydantic.ValidationError: 1 validation error\\n  Value error, too long", file=sys.stderr)
    sys.exit(1)
if how == "flood":
    sys.stdout.write("x" * 30_000_000 + "\\r" + "a.a." * 100_000 + "\\n")
    sys.stdout.write("a line of a log that says nothing\\n" * 200_000)
    sys.exit("ValueError: and this is why")
if how == "slow":
    time.sleep(100)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if how == "hung":
            time.sleep(100)
        self.send_response(503 if how == "sick" else 200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words):
        pass

server = http.server.HTTPServer(("127.0.0.1", int(flag("--port", "0"))), Handler)
if how == "dies":
    server.handle_request()
    time.sleep(1)
    print("torch.OutOfMemoryError: it grew", flush=True)
    os._exit(5)
server.serve_forever()
"""

_TORCH = """
import json
_GPUS = json.loads({gpus!r})

class version:
    hip = None

class cuda:
    @staticmethod
    def is_available():
        return bool(_GPUS)

    @staticmethod
    def device_count():
        return len(_GPUS)

    @staticmethod
    def mem_get_info(index):
        return _GPUS[index]["free"], _GPUS[index]["total"]

    @staticmethod
    def get_device_name(index):
        return _GPUS[index]["name"]

    @staticmethod
    def get_device_capability(index):
        return tuple(_GPUS[index]["capability"])
"""


def make_engine(
    folder: Path, name: str = "vllm", version: str | None = "0.32.0", gpus: Any = ()
) -> Path:
    """Make the interpreter; return its path. `gpus` are dicts of name, free, total, capability."""
    site = folder / "site"
    module = site / (MODULES[name].replace(".", "/") + ".py")
    module.parent.mkdir(parents=True)
    for package in [module.parent, *module.parent.parents]:
        if package == site:
            break
        (package / "__init__.py").touch()
    module.write_text(_SERVER, encoding="utf-8")
    (site / "torch.py").write_text(_TORCH.format(gpus=json.dumps(list(gpus))), encoding="utf-8")
    if version is not None:
        metadata = site / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    # -S: what this environment has, the plugin above all, is not the fake engine's
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


def gpu(free_gb: float, total_gb: float, name: str = "H200") -> dict[str, Any]:
    return {
        "name": name,
        "free": int(free_gb * 1e9),
        "total": int(total_gb * 1e9),
        "capability": [9, 0],
    }


def read_record(path: Path, timeout_s: float = 20.0) -> dict[str, Any]:
    """What the server wrote down, once it has."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, "the fake engine did not start"
        time.sleep(0.02)
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def are_gone(pids: list[int], timeout_s: float = 5.0) -> bool:
    """Whether no such process runs any more; a zombie does not run."""
    deadline = time.monotonic() + timeout_s
    while any(map(_runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
