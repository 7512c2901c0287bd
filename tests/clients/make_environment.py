"""Makes the environments of the clients, once: `make clients`.

    python -m tests.clients.make_environment

Those of Python lie in .clients, what node needs beside its scripts; git ignores both. Everything
has an exact version. Where a package cannot be had, or there is no node, this fails in words.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.clients.client_processes import STAMP, environments, folder_of, is_complete

MIN_NODE = 20


class CannotBeMade(Exception):
    """An environment is missing something of this machine or of the network."""


def main() -> int:
    missing = [name for name in environments() if not is_complete(name)]
    if missing:
        print(f"Installing the clients ({', '.join(missing)}); it takes minutes …", flush=True)
    for name in missing:
        began = time.monotonic()
        try:
            make(name)
        except CannotBeMade as error:
            print(f"The tests of the clients cannot run: {error}", file=sys.stderr)
            return 1
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def make(name: str) -> None:
    """Install one environment anew; its stamp comes last, so half a one is never taken."""
    folder, source = folder_of(name), environments()[name]
    shutil.rmtree(folder, ignore_errors=True)
    if name == "js":
        make_node(source.parent)
    else:
        make_python(folder, source)
    (folder / STAMP).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")


def make_python(folder: Path, requirements: Path) -> None:
    run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    run([*pip, "--no-deps", "--requirement", str(requirements)])


def make_node(folder: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise CannotBeMade(f"node {MIN_NODE} or newer and npm are needed, and not on the PATH.")
    version = run(["node", "--version"]).strip().lstrip("v")
    if int(version.partition(".")[0]) < MIN_NODE:
        raise CannotBeMade(f"node is {version}; {MIN_NODE} or newer is needed.")
    run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)])


def run(command: list[str]) -> str:
    """Run it silently; an error has what it said at last."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise CannotBeMade(f"`{' '.join(command)}` failed with status {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
