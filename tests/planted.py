"""A folder of modules with the names of others, each of which leaves a mark when it is imported."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = ("pip", "torch", "json", "flashdraft", "sitecustomize", "usercustomize", "multiprocessing")
# what a shell's `PYTHONPATH=$PYTHONPATH:…` leaves behind, and the folder by other names
VARIANTS = ["", ".", f":{ROOT}", f"{ROOT}:.:../hostile:"]
_MARK = """
import os
open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"ran-{__name__}"), "w").close()
raise ImportError(f"the planted {__name__} was imported")
"""


def plant(folder: Path) -> Path:
    """Make the folder."""
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(_MARK, encoding="utf-8")
    return folder


def ran(folder: Path) -> list[str]:
    """The marks that were left."""
    return sorted(name for name in os.listdir(folder) if name.startswith("ran-"))
