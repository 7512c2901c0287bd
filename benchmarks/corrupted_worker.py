"""The process that loads corrupted checkpoints for corrupted_checkpoints.py, one after another.

It takes a line of JSON for each (`model`, `draft`) and answers with one: what came of it, in how
many seconds, and by how much its memory grew. It cannot reserve more than a gigabyte beyond what
it has once whole checkpoints were loaded; a case that kills it, or hangs it, is its parent's to
name.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from flashdraft.core import SamplingParams
from flashdraft.errors import FlashdraftError
from flashdraft.llm import LLM

MAX_BYTES = 10**9
MAX_MESSAGE = 4000  # characters that a user may be shown of one error
_CACHE_GB = 0.01
_NUM_TOKENS = 2
_STATUS = Path("/proc/self/status")


def load_and_generate(model: str, draft: str | None) -> str:
    """Load a model and let it say two tokens; what happened, in a word."""
    llm = LLM(model, draft=draft, verify=2 if draft else "auto", device="cpu", cache_gb=_CACHE_GB)
    params = SamplingParams(max_tokens=_NUM_TOKENS)
    llm.generate([[5, 6, 7]], params)
    if llm.tokenizer is None:
        return "loaded without a tokenizer"
    llm.generate(["the fox"], params)
    if llm.tokenizer.chat_template is None:
        return "loaded without a template"
    llm.chat([{"role": "user", "content": "the fox"}], params)
    return "loaded"


def try_case(model: str, draft: str | None) -> dict[str, Any]:
    """The outcome of one case; `fault` says what must not be."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, start = _kilobytes("VmRSS"), time.monotonic()
    fault = None
    message = ""
    try:
        outcome = load_and_generate(model, draft)
    except FlashdraftError as error:
        outcome, message = type(error).__name__, str(error)
        hidden = [one for one in message if not one.isprintable() and one != "\n"]
        if hidden:
            fault = f"the message holds control characters: {hidden[:5]!r}"
        elif not message or len(message) > MAX_MESSAGE:
            fault = f"the message has {len(message)} characters"
    except BaseException as error:
        outcome, message = type(error).__name__, str(error)[:MAX_MESSAGE]
        fault = "".join(traceback.format_exception(error)[-6:])[-1500:]
    grown = 1024 * (_kilobytes("VmHWM") - before)
    seconds = time.monotonic() - start
    gc.collect()
    return {
        "outcome": outcome,
        "message": message,
        "fault": fault,
        "seconds": seconds,
        "bytes": grown,
    }


def main(warm_up: list[str]) -> None:
    """Load whole checkpoints first (model=draft or model), then answer every line."""
    torch.set_num_threads(1)
    for pair in warm_up:
        model, _, draft = pair.partition("=")
        for _ in range(2):
            found = try_case(model, draft or None)
            assert found["outcome"] == "loaded" and found["fault"] is None, (pair, found)
    room = 1024 * _kilobytes("VmSize") + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    answers = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(try_case(case["model"], case["draft"])), file=answers, flush=True)


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"{_STATUS} has no {field}")


if __name__ == "__main__":
    main(sys.argv[1:])
