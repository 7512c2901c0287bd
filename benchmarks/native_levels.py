"""Whether all levels of the native kernels give the same bits, on this machine and emulated.

    apt-get install qemu-user gcc-aarch64-linux-gnu clang
    python -m benchmarks.native_levels --output benchmarks/results/native_levels.json

Compiles native_levels.c, with the kernels and the flags of setup.py, for each level of both
architectures and with every compiler at hand, and runs it: directly where this processor has the
instructions, and under qemu-user as an older processor that has them and nothing newer. The output
is a checksum for each kernel and shape; all must be equal. What can be run nowhere is compiled, and
reported so. Detection is run as every emulated processor.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
NATIVE = ROOT / SETUP["FOLDER"]
SOURCES = [ROOT / "benchmarks/native_levels.c"] + [
    NATIVE / f"{name}.c" for name in SETUP["SOURCES"] if name != "module"
]
LEVELS = {"x86_64": SETUP["X86_64"], "aarch64": SETUP["AARCH64"]}
COMPILERS = {
    "x86_64": (["gcc"], ["clang"]),
    "aarch64": (["aarch64-linux-gnu-gcc"], ["clang", "--target=aarch64-linux-gnu"]),
}
# A processor of qemu-user that has the level and none above it. It knows neither AVX-512 nor
# AVX-VNNI.
EMULATED = {
    "sse2": "Nehalem",
    "avx2": "Haswell",
    "neon": "cortex-a72",
    "dotprod": "neoverse-n1",
    "i8mm": "max",
}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ)
    )


def build(compiler: list[str], flags: list[str], to: Path) -> str | None:
    """What the compiler says where it fails."""
    sources = [str(source) for source in SOURCES]
    options = [*SETUP["FLAGS"], *flags, f"-I{NATIVE}", "-static"]
    done = run([*compiler, *options, *sources, "-lm", "-o", str(to)])
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[0]


def emulator(architecture: str, cpu: str) -> list[str]:
    return [f"qemu-{architecture}", "-cpu", cpu]


def examine(
    architecture: str, level: str, compiler: list[str], folder: Path
) -> list[dict[str, Any]]:
    """One entry for each way in which this level could be run."""
    program = folder / f"{level}-{compiler[0]}"
    entry = {"level": level, "compiler": compiler[0]}
    failure = build(compiler, LEVELS[architecture][level], program)
    if failure:
        return [{**entry, "ran": None, "why": failure}]
    ways: dict[str, list[str]] = {}
    is_ours = platform.machine() == architecture
    if is_ours and level in run([str(program), "detect"]).stdout.split():
        ways["this machine"] = []
    if level in EMULATED and shutil.which(f"qemu-{architecture}"):
        cpu = EMULATED[level]
        ways[f"qemu-{architecture} -cpu {cpu}"] = emulator(architecture, cpu)
    entries = []
    for name, prefix in ways.items():
        done = run([*prefix, str(program)])
        digest = hashlib.sha256(done.stdout.encode()).hexdigest()[:16]
        lines = len(done.stdout.splitlines())
        entries.append(
            {**entry, "ran": name, "rc": done.returncode, "results": lines, "digest": digest}
        )
    return entries or [{**entry, "ran": None, "why": "compiled; no processor here has it"}]


def detected(architecture: str, folder: Path) -> dict[str, list[str]]:
    """What detection finds on each emulated processor."""
    baseline = next(iter(LEVELS[architecture]))
    program = folder / f"{baseline}-{COMPILERS[architecture][0][0]}"
    found = {}
    for level in LEVELS[architecture]:
        if level in EMULATED and program.exists() and shutil.which(f"qemu-{architecture}"):
            cpu = EMULATED[level]
            command = [*emulator(architecture, cpu), str(program), "detect"]
            found[cpu] = run(command).stdout.split()
    return found


def version(command: str) -> str | None:
    if not shutil.which(command):
        return None
    return run([command, "--version"]).stdout.splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="The bits of every level of the kernels.")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    entries: list[dict[str, Any]] = []
    detection: dict[str, dict[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for architecture, levels in LEVELS.items():
            for compiler in COMPILERS[architecture]:
                if not shutil.which(compiler[0]):
                    continue
                for level in levels:
                    found = examine(architecture, level, compiler, Path(name))
                    entries += [{"architecture": architecture, **entry} for entry in found]
                    print(*found, sep="\n", flush=True)
            detection[architecture] = detected(architecture, Path(name))
    ran = [entry for entry in entries if entry["ran"]]
    all_equal = len({entry["digest"] for entry in ran}) == 1 and not any(e["rc"] for e in ran)
    print("all equal" if all_equal else "NOT EQUAL", detection)
    programs = ("gcc", "clang", "aarch64-linux-gnu-gcc", "qemu-x86_64", "qemu-aarch64")
    result = {
        "what": "checksums of every kernel's output bits, by level; rc 1: rows do not stand alone",
        "all_equal": all_equal,
        "detected": detection,
        "levels": entries,
        "versions": {program: version(program) for program in programs},
        "machine": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.native_levels",
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
