"""Heads of a drafter: what a slot's candidates are worth, given the token before them.

A block's slots are filled side by side, so a plain drafter's likeliest tokens need not fit each
other. A head turns the slots' candidates and the block's hidden rows into scores of paths: to every
candidate's logit it adds what speaks for it behind each candidate of the slot before. Chains and
trees are made of the same table (kernels/paths.py). All published heads are bilinear,

    score(before, candidate) = context(before, hidden row) . successor(candidate),

and differ in what the context is. Parameters have their names in the published checkpoints. The
same modules serve training and inference.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from flashdraft.kernels.paths import PathScores
from flashdraft.models.drafter.head_config import SELECTOR, HeadConfig


class PathHead(Protocol):
    """A head's two halves."""

    def contexts(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[..., count, rank] for rows [..., hidden_size] and tokens before them [..., count]."""
        ...

    def successors(self, draft_ids: Tensor) -> Tensor:
        """[..., rank] for ids of the draft vocabulary."""
        ...


class MarkovHead(nn.Module):
    """DSpark's: a low-rank table of bigrams; `gate_proj`, if any, weighs it by the hidden row."""

    def __init__(
        self, config: HeadConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        rank = config.rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if config.is_gated else None

    def contexts(self, hidden: Tensor, before: Tensor) -> Tensor:
        rows = self.markov_w1(before)
        if self.gate_proj is None:
            return rows
        # of the product over both halves each is needed once
        weight, width = self.gate_proj.weight, hidden.shape[-1]
        own = nn.functional.linear(hidden, weight[:, :width], self.gate_proj.bias)
        gate = own.unsqueeze(-2) + nn.functional.linear(rows, weight[:, width:])
        return torch.sigmoid(gate) * rows

    def successors(self, draft_ids: Tensor) -> Tensor:
        return nn.functional.embedding(draft_ids, self.markov_w2.weight)

    @torch.no_grad()
    def begin(self) -> None:
        """Say nothing at first."""
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        self.markov_w2.weight.zero_()
        if self.gate_proj is not None:
            self.gate_proj.weight.zero_()
            self.gate_proj.bias.zero_()


class CandidateSelector(nn.Module):
    """DFlash 2's: bigrams of two codebooks, weighed by a projection of the hidden row."""

    def __init__(
        self, config: HeadConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        rank = config.rank
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def contexts(self, hidden: Tensor, before: Tensor) -> Tensor:
        rows = nn.functional.embedding(before, self.predecessor_codebook)
        return rows * self.hidden_projection(hidden).unsqueeze(-2)

    def successors(self, draft_ids: Tensor) -> Tensor:
        return nn.functional.embedding(draft_ids, self.successor_codebook)

    @torch.no_grad()
    def begin(self) -> None:
        """Say nothing at first."""
        nn.init.normal_(self.predecessor_codebook, std=0.02)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)
        self.successor_codebook.zero_()


class ConfidenceHead(nn.Module):
    """DSpark's: how likely the target agrees at a slot."""

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__()
        self.sees_token = config.confidence_sees_token
        self.proj = nn.Linear(hidden_size + (config.rank if self.sees_token else 0), 1)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[..., count] for hidden rows [..., hidden_size] and tokens' rows [..., count, rank]."""
        width = hidden.shape[-1]
        own = nn.functional.linear(hidden, self.proj.weight[:, :width], self.proj.bias)
        if not self.sees_token:
            return own.expand(rows.shape[:-1])
        return own + nn.functional.linear(rows, self.proj.weight[:, width:]).squeeze(-1)

    @torch.no_grad()
    def begin(self) -> None:
        """Be of no opinion at first."""
        self.proj.weight.zero_()
        self.proj.bias.zero_()


def make_head(
    config: HeadConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int
) -> MarkovHead | CandidateSelector:
    """A head of these sizes."""
    kind = CandidateSelector if config.kind == SELECTOR else MarkovHead
    return kind(config, hidden_size, vocab_size, draft_vocab_size)


def score_paths(
    head: MarkovHead | CandidateSelector,
    confidence: ConfidenceHead | None,
    hidden: Tensor,
    before: Tensor,
    draft_ids: Tensor,
) -> PathScores:
    """What a head says of hidden rows [..., slots, hidden_size].

    `before` [..., slots, count] are the tokens that may stand before a slot, `draft_ids` [...,
    slots, candidates] those that may stand there.
    """
    contexts, successors = head.contexts(hidden, before), head.successors(draft_ids)
    added = (contexts.float() @ successors.float().mT).contiguous()
    if confidence is None:
        return PathScores(added, None)
    assert isinstance(head, MarkovHead)
    logits = confidence.logits(hidden, head.markov_w1(before))
    return PathScores(added, logits.float().sigmoid().contiguous())
