"""Where the clients live, and a script in one of their environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".clients"  # git ignores it
NODE_MODULES = HERE / "js" / "node_modules"
STAMP = ".stamp"  # holds what an environment was made from, once it is complete
TIMEOUT_S = 240
# what clients would fetch or report of their own accord
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# a proxy of the machine cannot reach its loopback, and keys of the user are nobody's business
UNWANTED = ("PYTHONPATH", "OPENAI_", "ANTHROPIC_", "OLLAMA_", "http_proxy", "HTTP_PROXY")

Report = dict[str, dict[str, Any]]


def environments() -> dict[str, Path]:
    """What each environment is made from, by its name; `js` is the one of node."""
    files = sorted((HERE / "requirements").glob("*.txt"))
    return {path.stem: path for path in files} | {"js": HERE / "js" / "package.json"}


def folder_of(name: str) -> Path:
    return NODE_MODULES if name == "js" else FOLDER / name


def is_complete(name: str) -> bool:
    """Whether an environment is there, made from what the repository says now."""
    stamp = folder_of(name) / STAMP
    made_from = stamp.read_text(encoding="utf-8") if stamp.exists() else None
    return made_from == environments()[name].read_text(encoding="utf-8")


def run_script(name: str, script: str, url: str, model: str, aspects: list[str]) -> Report:
    """What a script reports of a server; its last line is the report."""
    if name == "js":
        command = [shutil.which("node") or "node", str(HERE / "js" / f"{script}.mjs")]
    else:
        command = [str(folder_of(name) / "bin" / "python"), str(HERE / "python" / f"{script}.py")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(UNWANTED)}
    done = subprocess.run(
        [*command, url, model, *aspects],
        env=kept | QUIET,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0 and done.stdout, f"{script}: {done.stdout}{done.stderr[-4000:]}"
    return json.loads(done.stdout.rstrip("\n").rpartition("\n")[2])
