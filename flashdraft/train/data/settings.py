"""How a target's prompts and answers are written: settings that are checked, and no torch."""

from __future__ import annotations

from dataclasses import dataclass

from flashdraft.errors import TrainingError

THINKING = {"default": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are written. All of it belongs to a folder's identity."""

    max_tokens: int = 512
    max_prompt_tokens: int = 512  # longer prompts are left out, and counted
    answers_per_prompt: int = 1  # the second and later ones are sampled
    greedy_share: float = 1.0  # of the first answers; the others are sampled
    temperatures: tuple[float, ...] = (0.7, 1.0)  # of sampled answers, drawn at random
    thinking: tuple[str, ...] = ("default",)  # "default", "on", "off": an answer for each
    loops: str = "cut"  # an answer that ends in a loop: "cut" to a few repeats, "keep" or "drop"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt_tokens", "answers_per_prompt"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0.0 <= self.greedy_share <= 1.0:
            raise TrainingError(f"greedy_share is {self.greedy_share}; it must be from 0 to 1.")
        if not self.temperatures or min(self.temperatures) <= 0.0:
            raise TrainingError(f"temperatures is {self.temperatures}; all must be above 0.")
        if not self.thinking or not set(self.thinking) <= set(THINKING):
            raise TrainingError(f"thinking is {self.thinking}; it may hold {', '.join(THINKING)}.")
        if self.loops not in ("cut", "keep", "drop"):
            raise TrainingError(f"loops is {self.loops!r}; it must be cut, keep or drop.")


@dataclass(frozen=True)
class SynthSettings:
    """How messages are drawn and which are kept."""

    temperatures: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0, 1.1)  # taken in turn
    min_tokens: int = 4
    max_tokens: int = 512
    any_language: bool = False  # else mostly-ASCII text only
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise TrainingError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; the first must "
                "be at least 1 and at most the second."
            )
        if not self.temperatures or min(self.temperatures) <= 0:
            raise TrainingError(f"temperatures is {self.temperatures}; all must be above 0.")
