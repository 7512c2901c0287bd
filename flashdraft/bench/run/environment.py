"""Where and with what a benchmark ran, without a trace of the machine's own paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from flashdraft.core import VERSION
from flashdraft.llm import LLM

ROOT = Path(__file__).parents[3]
_SECRETS = ("--api-key",)


def describe_environment(arguments: Iterable[str], llm: LLM | None = None) -> dict[str, Any]:
    """What the results say of the machine; without an `llm` the engine's part is not known."""
    device = torch.device("cpu") if llm is None else llm.kernels.device
    return {
        "package": f"flashdraft {VERSION}",
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": _device_name(device),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": None if llm is None else llm.kernels.weight_dtype,
        "kernels": None if llm is None else llm.kernels.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shown_command(arguments),
    }


def commit() -> str | None:
    """The source's commit, marked where files have been changed since; None if not a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def shown_command(arguments: Iterable[str]) -> str:
    """The command line, without folders and without keys."""
    shown, hides = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides:
            shown.append("…")
        elif equals and name in _SECRETS:
            shown.append(f"{name}=…")
        else:
            shown.append(shown_path(argument))
        hides = argument in _SECRETS
    return " ".join(["flashdraft", *shown])


def shown_path(text: str) -> str:
    """A path outside the current folder by its last part; any other text as it is."""
    name, equals, value = text.partition("=")
    value = value if equals else text
    if os.path.isabs(value) or value.startswith(("..", "~")):
        value = Path(value).name or value
    return f"{name}={value}" if equals else value


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def _cpu_name() -> str:
    """The processor's name where the system tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else f"{platform.machine()} CPU"
