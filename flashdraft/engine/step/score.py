"""Log-probabilities of a prompt's own tokens, from rows that the prefill computes anyway."""

from __future__ import annotations

from torch import Tensor

from flashdraft.core import TokenLogprob
from flashdraft.engine.sampling.process import logprobs_of
from flashdraft.engine.scheduler import Work
from flashdraft.models.layers import Target

ROWS_AT_ONCE = 16  # logits of a long chunk over a large vocabulary would fill the memory


def score_prompt(target: Target, work: Work, hidden: Tensor) -> list[TokenLogprob]:
    """What this share of the prompt adds to `prompt_logprobs`; hidden [num_tokens, hidden_size].

    Rows whose logprobs are known from an earlier pass over them are left out.
    """
    sequence, num_top = work.sequence, work.sequence.request.prompt_logprobs
    if sequence.prompt_logprobs is None or num_top is None:
        return []
    first = len(sequence.prompt_logprobs) - 1  # a token's logprob comes from the row before it
    end = min(work.start + work.num_tokens, sequence.num_prompt - 1)
    scores = []
    for begin in range(first, end, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, end - begin)
        logits = target.logits(hidden[begin - work.start :][:count])
        following = sequence.tokens[begin + 1 : begin + 1 + count]
        scores += [
            logprobs_of(row, token, num_top) for row, token in zip(logits, following, strict=True)
        ]
    return scores
