"""The tasks of a benchmark: prompts from task files, the Hub, one's own file, or built-in samples.

A task file has one JSON object a line with `prompt`, `turns` or `messages`, and beside it whatever
checks the answer. Nothing here knows a model, an engine or a clock.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.errors import RequestError

HUB = "hub"  # as --data
SAMPLE = "sample"  # as a task: all built-in ones
SAMPLE_FOLDER = Path(__file__).parent / "samples"
PROMPT_SUFFIXES = (".jsonl", ".txt")


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to hold: what is sent first, and the user's later turns."""

    messages: tuple[Mapping[str, Any], ...]
    follow_ups: tuple[str, ...] = ()
    row: Mapping[str, Any] | None = None  # the file's, with what checks the answer

    @property
    def num_turns(self) -> int:
        return 1 + len(self.follow_ups)


@dataclass(frozen=True)
class Task:
    """Prompts of one kind."""

    name: str
    prompts: tuple[BenchPrompt, ...]
    checked_as: str  # the published task whose way to check answers fits this one
    problems: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(prompt.num_turns for prompt in self.prompts)

    def digest(self) -> str:
        """SHA-256 of everything that is sent, in order, but for the model's own answers."""
        sent = [[list(prompt.messages), list(prompt.follow_ups)] for prompt in self.prompts]
        text = json.dumps(sent, ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class _Published:
    """A published task: its file's names, and its home on the Hub."""

    files: tuple[str, ...]
    hub: tuple[str, str | None, str]  # data set, configuration, split
    make_row: Callable[[Mapping[str, Any]], dict[str, Any]]  # from the Hub's form to the file's


_STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _gsm8k_row(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": row["question"] + _STEPS, "answer": answer}


def _math_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": row["problem"] + _STEPS, "answer": row["answer"]}


def _humaneval_row(row: Mapping[str, Any]) -> dict[str, Any]:
    ask = "Write a solution to the following problem and make sure that it passes the tests:"
    return {
        "prompt": f"{ask}\n```python\n{row['prompt']}\n```",
        "code_prompt": row["prompt"],
        "entry_point": row["entry_point"],
        "test": row["test"],
    }


def _mbpp_row(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = list(row["test_list"])
    ask = f"{row['prompt']}\nYour code should pass these tests:\n" + "\n".join(tests)
    return {"prompt": ask, "tests": tests, "test_imports": list(row["test_imports"])}


def _mt_bench_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"turns": list(row["prompt"])}


PUBLISHED = {
    "gsm8k": _Published(("gsm8k", "gsm8k_test"), ("openai/gsm8k", "main", "test"), _gsm8k_row),
    "math500": _Published(("math500",), ("HuggingFaceH4/MATH-500", None, "test"), _math_row),
    "humaneval": _Published(
        ("humaneval",), ("openai/openai_humaneval", None, "test"), _humaneval_row
    ),
    "mbpp": _Published(
        ("mbpp", "mbpp_sanitized_test"),
        ("google-research-datasets/mbpp", "sanitized", "test"),
        _mbpp_row,
    ),
    "mt_bench": _Published(
        ("mt_bench",), ("HuggingFaceH4/mt_bench_prompts", None, "train"), _mt_bench_row
    ),
}
# built-in samples, by the published task that each resembles
SAMPLES = {
    "sample-arithmetic": "gsm8k",
    "sample-mathematics": "math500",
    "sample-docstring": "humaneval",
    "sample-programming": "mbpp",
    "sample-chat": "mt_bench",
}


def load_tasks(
    names: Sequence[str], data: str | None, num_prompts: int | None, seed: int
) -> list[Task]:
    """The named tasks, `num_prompts` of each drawn by the seed and kept in the file's order."""
    tasks = []
    for name in _expand(names):
        if name in SAMPLES:
            file = SAMPLE_FOLDER / (name.removeprefix("sample-") + ".jsonl")
            task = _read_task(name, file, SAMPLES[name])
        elif name not in PUBLISHED:
            known = ", ".join((*PUBLISHED, SAMPLE, *SAMPLES))
            raise RequestError(f"There is no task {name!r}; known are {known}.")
        elif data is None:
            raise RequestError(
                f"The task {name} is not part of flashdraft; name the folder of its file with "
                f"--data, or --data {HUB} to fetch it, or use --tasks {SAMPLE}."
            )
        else:
            task = _from_hub(name) if data == HUB else _read_task(name, _find(name, data), name)
        tasks.append(_draw(task, num_prompts, seed))
    return tasks


def tasks_in(data: str | None) -> list[str]:
    """The tasks there are: the samples, all published ones on the Hub, or those in a folder."""
    if data is None:
        return [SAMPLE]
    if data == HUB:
        return list(PUBLISHED)
    folder = _folder(data)
    found = [name for name in PUBLISHED if any(file.is_file() for file in _files(name, folder))]
    if not found:
        raise RequestError(f"{data} holds no file of the tasks {', '.join(PUBLISHED)}.")
    return found


def load_prompts(path: Path, num_prompts: int | None, seed: int) -> Task:
    """A task of one's own prompts: .jsonl as in task files, or .txt with one prompt a line."""
    if path.suffix not in PROMPT_SUFFIXES:
        raise RequestError(
            f"{path} has an unknown ending; prompts come from {' or '.join(PROMPT_SUFFIXES)}."
        )
    return _draw(_read_task(path.stem, path, path.stem), num_prompts, seed)


def _expand(names: Sequence[str]) -> list[str]:
    every = [one for name in names for one in (SAMPLES if name == SAMPLE else (name,))]
    if not every:
        raise RequestError("No task is named; give --tasks at least one.")
    return list(dict.fromkeys(every))


def _find(name: str, data: str) -> Path:
    wanted = _files(name, _folder(data))
    for file in wanted:
        if file.is_file():
            return file
    names = " and no ".join(file.name for file in wanted)
    raise RequestError(f"{data} holds no {names}, which the task {name} needs.")


def _folder(data: str) -> Path:
    folder = Path(data)
    if not folder.is_dir():
        raise RequestError(f"--data is {data}, which is no folder; give a folder or {HUB}.")
    return folder


def _files(name: str, folder: Path) -> list[Path]:
    return [folder / f"{stem}.jsonl" for stem in PUBLISHED[name].files]


def _read_task(name: str, path: Path, checked_as: str) -> Task:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    prompts: list[BenchPrompt] = []
    broken: list[int] = []
    is_text = path.suffix == ".txt"
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _from_text(line) if is_text else _from_json(line)
        if prompt is None:
            broken.append(number)
        else:
            prompts.append(prompt)
    if not prompts and is_text:
        raise RequestError(f"{path} holds no prompt: all its lines are empty; write one a line.")
    if not prompts:
        raise RequestError(
            f"{path} holds no usable prompt ({count_of(len(broken), 'broken line')}); a line is a "
            "JSON object with 'prompt', 'turns' or 'messages'."
        )
    complaints = _complaints(path.name, broken, len(broken) + len(prompts))
    return Task(name, tuple(prompts), checked_as, complaints)


def _complaints(file: str, broken: Sequence[int], num_lines: int) -> tuple[str, ...]:
    if not broken:
        return ()
    shown = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
    count = f"{len(broken)} of {num_lines} lines of {file} are"
    return (f"{count} broken and were left out (line {shown}).",)


def count_of(number: int, noun: str) -> str:
    """So many of them, in words: 1 prompt, 2 prompts."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _from_text(line: str) -> BenchPrompt:
    return BenchPrompt(({"role": "user", "content": line.strip()},))


def _from_json(line: str) -> BenchPrompt | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return prompt_of(row) if isinstance(row, Mapping) else None


def prompt_of(row: Mapping[str, Any]) -> BenchPrompt | None:
    """The conversation that a row describes; None if it describes none."""
    messages, turns, prompt = row.get("messages"), row.get("turns"), row.get("prompt")
    if isinstance(messages, list):
        return _from_messages(messages, row)
    if not (isinstance(turns, list) and turns):
        turns = [prompt]
    if not all(map(_is_text, turns)):
        return None
    return BenchPrompt(({"role": "user", "content": turns[0]},), tuple(turns[1:]), row)


def _from_messages(messages: Sequence[Any], row: Mapping[str, Any]) -> BenchPrompt | None:
    """A conversation's user turns; answers in it are left out, for the model writes its own."""
    if not all(isinstance(message, Mapping) for message in messages):
        return None
    kept = [m for m in messages if m.get("role") != "assistant"]
    if not kept or not all(_is_text(m.get("content")) and _is_text(m.get("role")) for m in kept):
        return None
    first = next((n for n, m in enumerate(kept) if m["role"] == "user"), None)
    if first is None or any(m["role"] != "user" for m in kept[first:]):
        return None
    sent = tuple({"role": m["role"], "content": m["content"]} for m in kept[: first + 1])
    return BenchPrompt(sent, tuple(m["content"] for m in kept[first + 1 :]), row)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode()  # JSON can spell half a character, which nobody can be sent
    except UnicodeEncodeError:
        return False
    return True


def _from_hub(name: str) -> Task:
    task = PUBLISHED[name]
    data_set, configuration, split = task.hub
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise RequestError(
            f"Fetching {name} from the Hub needs the package datasets: pip install datasets. Or "
            "name a folder with the task's file: --data FOLDER."
        ) from None
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            data_set, configuration, split=split
        )
        made = [prompt_of(task.make_row(row)) for row in rows]
    except Exception as error:  # of many kinds: no network, no such name, another form of rows
        raise RequestError(
            f"The data set {data_set} cannot be had from the Hub ({type(error).__name__}: {error});"
            " download it, and name its folder with --data."
        ) from None
    prompts = tuple(prompt for prompt in made if prompt is not None)
    if not prompts:
        raise RequestError(f"The data set {data_set} holds no usable prompt; use --data FOLDER.")
    broken = [number for number, prompt in enumerate(made, 1) if prompt is None]
    return Task(name, prompts, name, _complaints(data_set, broken, len(made)))


def _draw(task: Task, num_prompts: int | None, seed: int) -> Task:
    if num_prompts is None or num_prompts >= len(task.prompts):
        return task
    chosen = sorted(random.Random(seed).sample(range(len(task.prompts)), num_prompts))
    prompts = tuple(task.prompts[index] for index in chosen)
    return Task(task.name, prompts, task.checked_as, task.problems)
