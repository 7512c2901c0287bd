"""The engines that cpu_draft.py and cpu_plain.py compare, behind one method.

They know neither tasks nor ratios. All decode greedily on the CPU with torch's number of threads.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import transformers

from flashdraft import LLM, SamplingParams
from flashdraft.children import python_environment
from flashdraft.core import GenerationStats
from flashdraft.models.drafter.loading import read_drafter_config, save_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source

MODEL = "smollm2-135m"
COST_ROWS, COST_SLOTS = (1, 2, 4, 8, 16), (1, 4, 8, 15)
WARM_UP_TOKENS = 8
LLAMA_PROGRAM = """
import json, sys, time
import llama_cpp
path, threads = sys.argv[1], int(sys.argv[2])
llm = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
print(json.dumps(llama_cpp.__version__), flush=True)
for line in sys.stdin:
    ids, num_tokens = json.loads(line)
    llm.reset()
    begin = time.perf_counter()
    stream = llm.generate(ids, temp=0.0, top_k=1)
    next(stream)
    first = time.perf_counter() - begin
    for _ in range(num_tokens - 1):
        next(stream)
    print(json.dumps([time.perf_counter() - begin, first]), flush=True)
"""


class Turn(NamedTuple):
    """One answer: seconds to the last and to the first token; flashdraft's tokens and counts."""

    seconds: float
    first_s: float
    token_ids: list[int] | None = None
    stats: GenerationStats | None = None


class Contestant(Protocol):
    """An engine that answers a prompt in `num_tokens` tokens."""

    def answer(self, prompt_ids: list[int], num_tokens: int) -> Turn: ...

    def warm_up(self, prompt_ids: list[int]) -> None: ...

    def stop(self) -> None: ...


class Flashdraft:
    """Stops by itself, where plain decoding does: nobody tells it how long the answer is."""

    def __init__(self, draft: str | None, dtype: str, max_tokens: int) -> None:
        self.llm = LLM(MODEL, draft=draft, device="cpu", dtype=dtype)
        self._params = SamplingParams(max_tokens=max_tokens)

    def answer(self, prompt_ids: list[int], num_tokens: int) -> Turn:
        self.llm.engine.forget_prefixes()  # an earlier turn's prefix
        begin = time.perf_counter()
        (found,) = self.llm.generate([prompt_ids], self._params)
        seconds = time.perf_counter() - begin
        return Turn(seconds, found.stats.ttft_s, found.token_ids, found.stats)

    def warm_up(self, prompt_ids: list[int]) -> None:
        """A few tokens without drafts: the policy shall start as cold as a user's."""
        params = SamplingParams(max_tokens=WARM_UP_TOKENS)
        for _ in self.llm.stream(prompt_ids, params, verify=0):
            pass

    def stop(self) -> None:
        pass

    def costs(self) -> dict[str, Any] | None:
        """Milliseconds that the policy reckons with; reaches into it on purpose."""
        costs = self.llm.engine.policy._costs
        if costs is None:
            return None
        return {
            "target_ms_by_rows": {n: round(1000 * costs.target(n), 3) for n in COST_ROWS},
            "drafter_ms_by_slots": {n: round(1000 * costs.drafter(1, n), 3) for n in COST_SLOTS},
        }


class Transformers:
    """`generate` of the same weights in float32."""

    def __init__(self) -> None:
        checkpoint = open_checkpoint(resolve_source(MODEL).path)
        raw = {key: value for key, value in checkpoint.raw_config.items() if key != "model_type"}
        build: Any = transformers.LlamaForCausalLM
        self._model = build(transformers.LlamaConfig(**raw)).eval()
        tensors = {n: checkpoint.source.read(n).float() for n in checkpoint.source.names()}
        self._model.load_state_dict(tensors, strict=False)
        self._model.tie_weights()

    def answer(self, prompt_ids: list[int], num_tokens: int) -> Turn:
        clock = FirstTokenClock()
        begin = time.perf_counter()
        with torch.no_grad():
            self._model.generate(
                torch.tensor([prompt_ids]),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        return Turn(time.perf_counter() - begin, clock.times[1] - begin)

    def warm_up(self, prompt_ids: list[int]) -> None:
        self.answer(prompt_ids, WARM_UP_TOKENS)

    def stop(self) -> None:
        pass


class FirstTokenClock:
    """Notes when the prompt is taken and when the first token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        if len(self.times) < 2:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Llama:
    """llama.cpp through llama-cpp-python, kept in a process with an interpreter that has it."""

    def __init__(self, process: subprocess.Popen[str], version: str) -> None:
        self._process, self.version = process, version

    @classmethod
    def start(cls, python: str) -> Llama | str:
        """The engine, or why there is none."""
        path, threads = str(resolve_source(MODEL).path), str(torch.get_num_threads())
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                [python, "-c", LLAMA_PROGRAM, path, threads],
                env=python_environment(),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
        except OSError as error:
            return str(error.strerror)
        assert process.stdout is not None
        version = process.stdout.readline()
        if not version:
            _, errors = process.communicate()
            return (errors.strip() or "it failed").splitlines()[-1]
        return cls(process, json.loads(version))

    def answer(self, prompt_ids: list[int], num_tokens: int) -> Turn:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([prompt_ids, num_tokens]) + "\n")
        self._process.stdin.flush()
        return Turn(*json.loads(self._process.stdout.readline()))

    def warm_up(self, prompt_ids: list[int]) -> None:
        self.answer(prompt_ids, WARM_UP_TOKENS)

    def stop(self) -> None:
        self._process.communicate()  # its input ends, and so does it


def random_drafter(like: Path, folder: Path, seed: int) -> Path:
    """A drafter of the same shape that has learnt nothing."""
    config = read_drafter_config(like)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        save_drafter(Drafter(config), folder)
    return folder
