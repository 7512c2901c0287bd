"""Acceptance: which draft tokens are the target's own samples. Pure functions over tensors.

A draft token is kept iff it equals the token the target samples in its place, so the committed
tokens are always `samples[:num_accepted + 1]`, the last one being the bonus token. Nothing here
knows of caches, models or settings, and nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Acceptance(NamedTuple):
    """The outcome of one verify step for every sequence of a batch."""

    num_accepted: Tensor  # [num_seqs] int64
    bonus: Tensor  # [num_seqs]: the target's token after the last accepted draft token


def accept(samples: Tensor, drafts: Tensor, lengths: Tensor) -> Acceptance:
    """Accept the agreed prefix of every row.

    samples [num_seqs, width] are the target's tokens, drafts [num_seqs, width - 1] what was
    proposed for them, lengths [num_seqs] how many of a row's drafts count (0 .. width - 1). What
    lies behind a row's length is padding of any value.
    """
    slots = torch.arange(drafts.shape[1], device=drafts.device)
    agreed = (samples[:, :-1] == drafts) & (slots < lengths.unsqueeze(1))
    num_accepted = agreed.to(torch.int64).cumprod(1).sum(1)
    return Acceptance(num_accepted, samples.gather(1, num_accepted.unsqueeze(1)).squeeze(1))


def accept_ragged(
    samples: Tensor, tokens: Tensor, query_start: Tensor, max_width: int
) -> Acceptance:
    """Accept over the flat rows of a verify step.

    Sequence s owns rows query_start[s] : query_start[s + 1], at most `max_width` of them: its
    anchor, then its draft tokens; who has none accepts none. `tokens` [num_rows] went into the
    target, `samples` [num_rows] came out.
    """
    start, end = query_start[:-1].to(torch.int64), query_start[1:].to(torch.int64)
    columns = torch.arange(max_width, device=samples.device)
    # Rows past a sequence's end read some other row: `lengths` hides them.
    rows = (start.unsqueeze(1) + columns).clamp(max=samples.shape[0] - 1)
    return accept(samples[rows], tokens[rows[:, 1:]], end - start - 1)
