"""What a load asks: prompts of tasks, or of so many words; every question as a request's body.

A question follows from the seed and its number. Words are short and common: a token each in most
vocabularies, beside what a chat template adds. The server's own count is in the results.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.bench.run.served import KINDS, Served
from flashdraft.bench.tasks import Task
from flashdraft.bench.traffic.load import LengthRange

_TEXT = (
    "the of and to in is it for on with as at by from be have are this not but had his they she "
    "which you one we all were her would there their will when who him been has more if no out so "
    "said what up its about into than them can only other new some could time these two may then "
    "do first any my now such like our over man me even most made after also did many before must "
    "through back years where much your way well down should because each just those people how "
    "too little state good very make world still own see men work long get here between both life "
    "being under never day same another know while last might us great old year off come since"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Questions:
    """Questions without end for one server."""

    served: Served
    tasks: Sequence[Task]
    max_tokens: int
    seed: int
    is_greedy: bool  # else as the server has it
    thinking: bool = False
    verify: int | None = None  # of flashdraft's; None = its policy
    prompt_tokens: LengthRange | None = None  # instead of the tasks' prompts
    output_tokens: LengthRange | None = None  # answers to their full length, where it can be asked
    first: int = 0  # the number of the first question

    def body(self, place: int) -> dict[str, Any]:
        """The body of the question with this number."""
        place += self.first
        dice = random.Random(f"question {self.seed}/{place}")
        limit = self.max_tokens if self.output_tokens is None else self.output_tokens.draw(dice)
        body = self.served.ask(
            self._messages(dice),
            max_tokens=limit,
            seed=self.seed + place,
            greedy=self.is_greedy,
            thinking=self.thinking,
            # tasks have few prompts: each would be found in the prefix cache soon
            salt=uuid.uuid4().hex,
            verify=self.verify,
        )
        if self.output_tokens is not None and self.served.kind in KINDS:
            body["ignore_eos"] = True
        return body

    def _messages(self, dice: random.Random) -> list[Mapping[str, Any]]:
        if self.prompt_tokens is not None:
            words = dice.choices(WORDS, k=self.prompt_tokens.draw(dice))
            return [{"role": "user", "content": " ".join(words)}]
        task = dice.choice(self.tasks)
        return list(dice.choice(task.prompts).messages)

    def problems(self) -> list[str]:
        """What this server cannot be asked."""
        if self.output_tokens is not None and self.served.kind not in KINDS:
            return [
                f"{self.served.endpoint.url} is no server that is known to take ignore_eos: "
                "answers may end before the length that --output-tokens asks for."
            ]
        return []
