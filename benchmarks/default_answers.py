"""Whether a model at its default settings answers as well as it can: forty simple questions.

    python -m benchmarks.default_answers --output benchmarks/results/default_answers.json

Each question is asked greedily once, and by the model's default sampling with ten seeds; the score
is the share of answers that name what was asked for. The questions are fixed: their hash is part
of the results. An answer is looped if it ends in the same few words over and over, or by its limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment, write_results
from flashdraft import LLM, FinishReason, Generation, SamplingParams
from flashdraft.chat.sampling import answer_limit
from flashdraft.cli.arguments import model_sampling
from flashdraft.models.config.recommended import SAMPLING_KEYS
from flashdraft.models.sources import DEFAULT_MODEL

QUESTIONS = Path(__file__).parent / "data" / "forty_questions.json"
NUM_SEEDS = 10
MAX_PERIOD, MIN_TURNS = 40, 4  # words that repeat themselves, and how often, in a looped answer


def load_questions() -> tuple[list[dict[str, Any]], str]:
    """The questions, and the hash of their file."""
    content = QUESTIONS.read_bytes()
    return json.loads(content), hashlib.sha256(content).hexdigest()


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers stands in the text as a word of its own."""
    return any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text.lower()) for one in answers)


def is_looped(text: str) -> bool:
    """Whether the text ends in the same words several times in a row."""
    words = text.split()
    return any(
        words[-period * MIN_TURNS :] == words[-period:] * MIN_TURNS
        for period in range(1, min(MAX_PERIOD, len(words) // MIN_TURNS) + 1)
    )


def judge(question: dict[str, Any], generation: Generation) -> dict[str, bool]:
    """What is to be said of one answer."""
    text = generation.text
    return {
        "right": is_right(text, question["answers"]),
        "empty": not text.strip(),
        "looped": is_looped(text) or generation.finish_reason is FinishReason.LENGTH,
    }


def ask(llm: LLM, questions: Sequence[dict[str, Any]], params: SamplingParams) -> list[Generation]:
    """All questions at once, each as a conversation of its own."""
    prompts = [llm.chat_prompt([{"role": "user", "content": one["question"]}]) for one in questions]
    return llm.generate(prompts, params)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.default_answers",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--output", type=Path)
    found = parser.parse_args(arguments)
    questions, digest = load_questions()
    llm = LLM(found.model)
    defaults = model_sampling(llm.generation_config)
    limit = answer_limit(llm.generation_config, llm.engine.max_context)
    sampling = {name: getattr(defaults, name) for name in SAMPLING_KEYS}

    def run(settings: dict[str, Any], seed: int | None) -> list[dict[str, Any]]:
        params = SamplingParams(**settings, max_tokens=limit, seed=seed)
        pairs = zip(questions, ask(llm, questions, params), strict=True)
        return [{"text": answer.text, **judge(one, answer)} for one, answer in pairs]

    greedy, rounds = run({}, None), []
    for seed in range(found.seeds):
        rounds.append(run(sampling, seed))
        print(f"seed {seed}: {sum(one['right'] for one in rounds[-1])} right", file=sys.stderr)
    sampled = [one for answers in rounds for one in answers]
    best = sum(one["right"] for one in greedy) / len(questions)
    score = sum(one["right"] for one in sampled) / len(sampled)
    rows = [
        {
            "question": question["question"],
            "greedy": greedy[place],
            "right": sum(answers[place]["right"] for answers in rounds),
            "answers": Counter(answers[place]["text"][:80] for answers in rounds).most_common(3),
        }
        for place, question in enumerate(questions)
    ]
    document = {
        "environment": describe_environment("benchmarks.default_answers", torch.device("cpu")),
        "model": found.model,
        "questions_sha256": digest,
        "sampling": sampling,
        "max_tokens": limit,
        "seeds": found.seeds,
        "greedy_score": best,
        "default_score": score,
        "share_of_greedy": score / best if best else None,
        "empty": sum(one["empty"] for one in sampled),
        "looped": sum(one["looped"] for one in sampled),
        "capital_of_france": rows[0]["right"],
        "rows": rows,
    }
    write_results(found.output, document)
    names = ("greedy_score", "default_score", "share_of_greedy", "empty", "looped")
    print(json.dumps({name: document[name] for name in (*names, "capital_of_france", "sampling")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
