"""Prompts without a data set: the target itself writes them.

A chat model has seen many user turns. Its chat template is opened at the user's turn, the message
is sampled until the turn closes, and the ones that look like a message are kept. The file is only
ever appended to, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from flashdraft.chat.templates import render_chat
from flashdraft.errors import RequestError, TrainingError
from flashdraft.kernels.select import weights_of
from flashdraft.llm import LLM
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.data.decode import BulkDecoder, Continuation, Job
from flashdraft.train.data.prompts import ForbiddenRuns, NearDuplicates
from flashdraft.train.data.settings import SynthSettings
from flashdraft.train.lock import sole_writer

log = logging.getLogger(__name__)

SOURCE = "synth"
_SENTINEL = "8d2f6c1e0b7a4953"  # no template writes this by itself
_PATIENCE = 5000  # draws after which a target that keeps almost nothing is given up
_LEAST_SHARE = 0.005
_MIN_LETTERS = 0.6  # of the characters that are not white space
_MIN_ASCII = 0.95  # of the letters, unless any language will do
_REPORT_EVERY_S = 10.0


@dataclass
class SynthReport:
    """What a run did."""

    num_found: int = 0  # already in the file
    num_kept: int = 0
    num_drawn: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


class UserTurn(NamedTuple):
    """What stands before a user's message in the target's chat format, and what ends it."""

    prefix_ids: list[int]
    stop_ids: frozenset[int]


def open_user_turn(tokenizer: Tokenizer | None, eos_ids: Iterable[int], model: str) -> UserTurn:
    """Where a user's turn begins and which token closes it, found by rendering the template."""
    if tokenizer is None or tokenizer.chat_template is None:
        lacks = "tokenizer" if tokenizer is None else "chat template"
        raise TrainingError(
            f"{model} has no {lacks}, so no user's turn can be opened; give prompts of your own."
        )
    message = {"role": "user", "content": _SENTINEL}
    try:
        text = render_chat(tokenizer, [message], add_generation_prompt=False)
    except RequestError as error:
        raise TrainingError(
            f"The chat template of {model} does not take a single user message ({error}); give "
            "prompts of your own."
        ) from None
    before, found, after = text.partition(_SENTINEL)
    closing_ids = tokenizer.encode(after)
    if not found or _SENTINEL in after or not before.strip() or not closing_ids:
        raise TrainingError(
            f"The chat template of {model} does not show where a user's message begins and ends; "
            "give prompts of your own."
        )
    if closing_ids[0] not in tokenizer.special_ids:
        raise TrainingError(
            f"The chat template of {model} closes a user's turn by plain text ({after[:20]!r}), "
            "not by a token of its own; give prompts of your own."
        )
    return UserTurn(tokenizer.encode(before), frozenset({closing_ids[0], *eos_ids}))


def synthesize(
    llm: LLM,
    path: str | Path,
    count: int,
    settings: SynthSettings | None = None,
    *,
    exclude: Sequence[str] = (),
    num_slots: int | None = None,
) -> SynthReport:
    """Bring the JSONL file `path` to `count` prompts of the target's own making.

    Texts in `exclude` (a test's prompts) share no run of 13 words with what is kept. Load the
    target by `regenerate.load_target`.
    """
    settings, path = settings or SynthSettings(), Path(path)
    turn = open_user_turn(llm.tokenizer, llm.engine.target.config.eos_token_ids, llm.model)
    if not path.parent.is_dir():
        raise TrainingError(f"{path} cannot be written: there is no folder {path.parent}.")
    with sole_writer(path):
        return _continue(llm, turn, path, count, settings, exclude, num_slots)


def _continue(
    llm: LLM,
    turn: UserTurn,
    path: Path,
    count: int,
    settings: SynthSettings,
    exclude: Sequence[str],
    num_slots: int | None,
) -> SynthReport:
    target, tokenizer = llm.engine.target, llm.tokenizer
    assert tokenizer is not None
    keeper = _Keeper(tokenizer, turn, settings, ForbiddenRuns(exclude))
    rows = _existing_rows(path)
    formats = weights_of(llm.kernels).describe()
    _refuse_other_formats(path, rows, formats)
    report = SynthReport(num_found=len(rows))
    for row in rows:
        keeper.remember(str(row["prompt"]))
    if len(rows) >= count:
        return report
    decoder = BulkDecoder(
        target,
        max_prompt=len(turn.prefix_ids),
        max_tokens=settings.max_tokens + 1,  # the closing token
        stop_ids=turn.stop_ids,
        num_slots=num_slots,
    )
    first_draw = max((int(row.get("draw", -1)) for row in rows), default=-1) + 1
    jobs = _jobs(turn, settings, first_draw)
    try:
        with (
            path.open("a", encoding="utf-8") as file,
            closing(decoder.run(jobs)) as made,  # type: ignore[type-var]
        ):
            _collect(made, keeper, file, formats, count - len(rows), report)
    except KeyboardInterrupt:
        log.warning(
            "Interrupted; %d of %d prompts are saved in %s. Run the same command again to go on.",
            report.num_found + report.num_kept,
            count,
            path,
        )
        raise
    except OSError as error:
        full = error.errno == errno.ENOSPC
        reason = "the disk is full" if full else error.strerror or str(error)
        raise TrainingError(
            f"{path} cannot be written: {reason}. The prompts in it are kept: run the same command "
            "again to go on."
        ) from None
    return report


def _jobs(turn: UserTurn, settings: SynthSettings, first: int) -> Iterator[Job]:
    for draw in itertools.count(first):
        temperature = settings.temperatures[draw % len(settings.temperatures)]
        seed = random.Random(f"{settings.seed} {draw}").getrandbits(62)
        yield Job(draw, turn.prefix_ids, temperature, seed)


def _collect(
    made: Iterator[Continuation],
    keeper: _Keeper,
    file: TextIO,
    formats: str,
    wanted: int,
    report: SynthReport,
) -> None:
    begin = shown_at = time.perf_counter()
    bar = tqdm(total=wanted, desc="Writing prompts", unit=" prompts", disable=None, leave=False)
    with bar:
        for one in made:
            report.num_drawn += 1
            report.num_tokens += len(one.token_ids)
            text, reason = keeper.judge(one)
            if text is None:
                report.dropped[reason] += 1
            else:
                row = {"prompt": text, "source": SOURCE, "draw": one.job.key, "weights": formats}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                report.num_kept += 1
                bar.update(1)
            now = time.perf_counter()
            report.seconds = now - begin
            if now - shown_at > _REPORT_EVERY_S:
                shown_at = now
                speed = f"{report.tokens_per_s / 1000:.1f}k tok/s"
                bar.set_postfix_str(speed)
                log.info("%d of %d prompts, %s", report.num_kept, wanted, speed)
            if report.num_kept == wanted:
                return
            if report.num_drawn >= _PATIENCE and report.num_kept < _LEAST_SHARE * report.num_drawn:
                raise TrainingError(
                    f"Of {report.num_drawn} messages only {report.num_kept} could be kept (dropped:"
                    f" {dict(report.dropped)}); the target does not write user turns. Give prompts "
                    "of your own."
                )


class _Keeper:
    """Decides which messages are kept."""

    def __init__(
        self, tokenizer: Tokenizer, turn: UserTurn, settings: SynthSettings, runs: ForbiddenRuns
    ) -> None:
        self._tokenizer, self._turn, self._settings = tokenizer, turn, settings
        self._runs = runs
        self._known = NearDuplicates()

    def remember(self, text: str) -> None:
        """Count a text of an earlier run among the known ones."""
        self._known.add(text)

    def judge(self, made: Continuation) -> tuple[str | None, str]:
        """The message's text, or None and why it is dropped."""
        settings = self._settings
        if not made.ended:
            return None, "did not end"
        ids = made.token_ids[:-1].tolist()
        if not settings.min_tokens <= len(ids) <= settings.max_tokens:
            return None, "length"
        if not self._tokenizer.special_ids.isdisjoint(ids):
            return None, "special tokens"
        text = self._tokenizer.decode(ids).strip()
        if not is_message(text, settings.any_language):
            return None, "not a message"
        if self._runs.overlap(text):
            return None, "excluded"
        return (text, "") if self._known.add(text) else (None, "near-duplicate")


def is_message(text: str, any_language: bool) -> bool:
    """Whether a text is mostly letters, and, unless any language will do, mostly ASCII ones."""
    visible = [character for character in text if not character.isspace()]
    letters = [character for character in visible if character.isalpha()]
    if "\ufffd" in text or len(letters) < _MIN_LETTERS * max(1, len(visible)):
        return False
    return any_language or sum(map(str.isascii, letters)) >= _MIN_ASCII * len(letters)


def _refuse_other_formats(path: Path, rows: Sequence[dict[str, Any]], ours: str) -> None:
    """One file, one target in one format; rows that are older than the field say nothing."""
    theirs = {str(row["weights"]) for row in rows if "weights" in row} - {ours}
    if theirs:
        raise TrainingError(
            f"{path} holds prompts that were written with the target's weights "
            f"{' and '.join(sorted(theirs))}, and now they are {ours}; name another file, or give "
            "the same --quantize and --quantize-head as before."
        )


def _existing_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run; a last line that was not finished is cut off."""
    if not path.exists():
        return []
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        rows = [json.loads(line) for line in whole.decode("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise TrainingError(f"{path} is not valid JSONL ({error}); name another file.") from None
    if not all(isinstance(row, dict) and isinstance(row.get("prompt"), str) for row in rows):
        raise TrainingError(f"{path} holds rows without a 'prompt'; name another file.")
    return rows
