"""`flashdraft generate PROMPT`: one answer, streamed, in a file or as JSON; or a comparison."""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashdraft.cli.answer import ShownAnswer, describe_cut, show_answer
from flashdraft.cli.arguments import model_sampling, sampling_params
from flashdraft.cli.display import AnswerView, Screen
from flashdraft.cli.files import STDOUT, check_writable, part_for_file, write_json, write_text
from flashdraft.cli.input import read_prompt
from flashdraft.cli.model import describe_model, load_model, require_template
from flashdraft.cli.pictures import PictureFile, check_picture_flags, content_of, pictures_of
from flashdraft.cli.statistics import describe_briefly, describe_fully
from flashdraft.core import Generation, PlacedPicture, SamplingParams
from flashdraft.errors import RequestError
from flashdraft.llm import LLM, Messages, Prompt
from flashdraft.models.config.recommended import SAMPLING_KEYS

WARM_UP_TOKENS = 8


def run(arguments: argparse.Namespace) -> int:
    """Answer the prompt."""
    sampling_params(arguments)  # a wrong flag is reported before the model is loaded
    _check(arguments)
    pictures = pictures_of(arguments)
    text = read_prompt(arguments.prompt, as_it_is=arguments.raw)
    llm = load_model(arguments)
    params = sampling_params(arguments, model_sampling(llm.generation_config))
    prompt = _make_prompt(llm, text, arguments, pictures)
    screen = Screen.detect()
    if arguments.compare:
        return _compare(llm, prompt, params, screen)
    seen = llm.chat_pictures(prompt) if pictures and not isinstance(prompt, str) else ()
    view = AnswerView(screen, echo=arguments.json is None and arguments.output is None)
    try:
        answer = show_answer(llm.stream(prompt, params), view)
    except KeyboardInterrupt:
        _note_interruption(arguments, llm, view, screen)
        raise
    assert answer.generation is not None  # nothing stops this stream but its end
    if arguments.output is not None:
        part = part_for_file(answer.generation.content, arguments.output)  # without thoughts
        write_text(arguments.output, part.text)
        screen.note(f"wrote {arguments.output}: {part.says}")
    if arguments.json is not None:
        write_json(arguments.json, as_json(answer.generation, params, seen))
    cut = describe_cut(answer.generation, params, llm.engine.max_context)
    if cut is not None:
        screen.note(f"Cut off {cut}")
    screen.note(f"{describe_model(llm)}\n{describe_fully(answer.num_tokens, answer.stats)}")
    return 0


def as_json(
    generation: Generation, params: SamplingParams, pictures: Sequence[PlacedPicture] = ()
) -> dict[str, Any]:
    """The documented form of `generate --json`; the histogram's keys are accepted lengths.

    The tokens of pictures are among the prompt's.
    """
    stats = generation.stats
    return {
        "sampling": {name: getattr(params, name) for name in SAMPLING_KEYS},
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason.value,
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": len(generation.token_ids),
        },
        "pictures": [
            {"width": one.width, "height": one.height, "tokens": one.num_tokens}
            for _, one in pictures
        ],
        "speculation": {
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "branches": stats.branches,
            "branches_accepted": stats.branches_accepted,
            "mean_accepted_length": stats.mean_accepted_length,
            "histogram": {str(n): count for n, count in sorted(stats.histogram.items())},
        },
        "policy": {
            "expected_tokens": stats.expected_tokens,
            "expected_s": stats.expected_s,
            "plain_tokens": stats.plain_tokens,
            "plain_s": stats.plain_s,
        },
        "timing": {
            "ttft_s": stats.ttft_s,
            "decode_s": stats.decode_s,
            "tokens_per_s": stats.tokens_per_s,
        },
    }


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what does not go together, before the model is loaded."""
    if arguments.raw and arguments.system is not None:
        raise RequestError("--system needs the chat template, which --raw leaves out; drop one.")
    check_picture_flags(arguments)
    if arguments.compare and (arguments.json is not None or arguments.output is not None):
        raise RequestError("--compare prints speeds, not an answer; drop --json and -o.")
    if arguments.compare and arguments.draft == "none":
        raise RequestError("--compare with --draft none has nothing to compare; drop one.")
    if arguments.output is not None:
        check_writable(arguments.output)
    if arguments.json not in (None, STDOUT):
        check_writable(Path(arguments.json))
        if (
            arguments.output is not None
            and arguments.output.resolve() == Path(arguments.json).resolve()
        ):
            raise RequestError(f"-o and --json both name {arguments.json}; give them two files.")


def _note_interruption(
    arguments: argparse.Namespace, llm: LLM, view: AnswerView, screen: Screen
) -> None:
    """What came until Ctrl-C; half an answer is no file."""
    files = [arguments.output] if arguments.output is not None else []
    files += [arguments.json] if arguments.json not in (None, STDOUT) else []
    kept = "".join(f" {file} is not written." for file in files)
    made = describe_briefly(view.progress.num_tokens, view.progress.stats)
    screen.note(f"Interrupted.{kept}\n{describe_model(llm)}\n{made}")


def _make_prompt(
    llm: LLM, text: str, arguments: argparse.Namespace, pictures: Sequence[PictureFile]
) -> str | Messages:
    if arguments.raw:
        return text
    require_template(llm)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content_of(text, pictures)}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return messages


def _compare(llm: LLM, prompt: Prompt | Messages, params: SamplingParams, screen: Screen) -> int:
    """Decode plainly and drafted, with one seed; on a CPU a difference is a failure."""
    if params.seed is None:
        params = dataclasses.replace(params, seed=random.getrandbits(62))

    def answer(settings: SamplingParams, verify: int | None) -> ShownAnswer:
        return show_answer(llm.stream(prompt, settings, verify), AnswerView(screen, echo=False))

    warm_up = min(params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS)
    answer(dataclasses.replace(params, max_tokens=warm_up), None)
    plain = answer(params, 0)
    drafted = answer(params, None)
    print(describe_model(llm))
    for name, one in (("plain", plain), ("drafted", drafted)):
        print(
            f"{name:<8} {one.stats.tokens_per_s:8.1f} tok/s   {one.num_tokens} tokens   "
            f"accepted length {one.stats.mean_accepted_length:.2f}"
        )
    if plain.stats.tokens_per_s > 0:
        print(f"{'speedup':<8} {drafted.stats.tokens_per_s / plain.stats.tokens_per_s:8.2f}x")
    assert plain.generation is not None and drafted.generation is not None
    place = _first_difference(plain.generation.token_ids, drafted.generation.token_ids)
    print("tokens   identical" if place is None else f"tokens   differ from token {place} on")
    return 1 if place is not None and llm.kernels.device.type == "cpu" else 0


def _first_difference(left: list[int], right: list[int]) -> int | None:
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    shorter = min(len(left), len(right))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), shorter)
