"""The training prompts of the default drafter: the given files, and rewordings of some of them.

A reworded question gets another answer from the target, so wordings are cheap prompts. Only the
training files are read; prompts that share a 13-word run with a file in --exclude are left out.

    python -m benchmarks.default_drafter_prompts TRAIN_FOLDER --exclude BENCH_FOLDER -o FILE
"""

from __future__ import annotations

import argparse
import ast
import collections
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from flashdraft.train.data.prompts import Prompt, drop_overlapping, read_prompts, read_texts

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MATH_WORDINGS = (
    "{}",
    "{}\nLet's think step by step.",
    "Solve this problem and show your work.\n{}",
    "{}\nExplain how you get the answer.",
    "Question: {}\nAnswer:",
)
CODE_WORDING = (
    "Write a solution to the following problem and make sure that it passes the tests:\n{}"
)
TASK_WORDINGS = ("Write a python function to {}.", "Write a function that does this: {}.")
TESTS = "\nYour code should pass these tests:"


def reworded(prompt: Prompt, rng: random.Random) -> Iterator[str]:
    """Other ways to ask for the same."""
    text = prompt.text
    if text.endswith(BOXED):
        for wording in rng.sample(MATH_WORDINGS, 2):
            yield wording.format(text.removesuffix(BOXED))
    elif TESTS in text:
        task, _, tests = text.partition(TESTS)
        yield task
        yield f"{task}{TESTS}\n{tests.strip().splitlines()[0]}"
        yield f"{task}\nExplain your code."
    elif prompt.source.startswith("pypi-python/complete"):
        fence = re.search(r"```python\n.*?```", text, re.DOTALL)
        if fence is not None:
            yield CODE_WORDING.format(fence.group())
            task = first_sentence(fence.group())
            if task is not None:
                yield rng.choice(TASK_WORDINGS).format(task)


def first_sentence(fence: str) -> str | None:
    """What a function's documentation says first, if it reads like a task."""
    code = fence.removeprefix("```python\n").removesuffix("```")
    try:
        function = ast.parse(code.rstrip() + "\n    pass\n").body[0]
        documentation = ast.get_docstring(function)  # type: ignore[arg-type]
    except (SyntaxError, TypeError, ValueError, IndexError):
        return None
    sentence = (documentation or "").split("\n\n")[0].split(". ")[0].replace("\n", " ").strip(" .")
    is_task = 4 <= len(sentence.split()) <= 30 and sentence[:1].isalpha()
    return sentence[0].lower() + sentence[1:] if is_task else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exclude", type=Path, action="append", default=[])
    parser.add_argument("--output", "-o", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    given = read_prompts(arguments.folder)
    extra = [
        Prompt.of(text, f"{prompt.source}+reworded")
        for prompt in given
        for text in reworded(prompt, rng)
    ]
    prompts = drop_overlapping(given + extra, read_texts(arguments.exclude))
    rng.shuffle(prompts)
    with gzip.open(arguments.output, "wt", encoding="utf-8") as file:
        for prompt in prompts:
            row = {"messages": list(prompt.messages), "source": prompt.source}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    counts = collections.Counter(prompt.source for prompt in prompts)
    print(json.dumps(counts, indent=2))
    print(f"{len(prompts)} prompts, {len(given) + len(extra) - len(prompts)} left out")


if __name__ == "__main__":
    main()
