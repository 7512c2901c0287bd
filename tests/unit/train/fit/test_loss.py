"""The fused head and loss against plain autograd, and the slots' weights by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdraft.train.fit.batches import NO_LABEL
from flashdraft.train.fit.loss import Head, head_argmax, head_loss, slot_weights

HEADS = {"plain": (1.0, None), "capped": (0.7, 2.0)}


def plain_loss(hidden: Tensor, labels: Tensor, head: Head) -> Tensor:
    """The same loss, written for autograd."""
    logits = hidden @ head.weight.T * head.multiplier
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return torch.nn.functional.cross_entropy(
        logits, labels, reduction="none", ignore_index=NO_LABEL
    )


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("chunk_rows", [5, 64])
def test_equals_autograd(shape: str, chunk_rows: int) -> None:
    torch.manual_seed(0)
    head = Head(torch.randn(33, 8, dtype=torch.float64), *HEADS[shape])
    hidden = torch.randn(14, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 33, (14,))
    labels[[3, 13]] = NO_LABEL
    weights = torch.rand(14)
    expected = plain_loss(hidden, labels, head)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), hidden)
    rows = head_loss(hidden, labels, head, chunk_rows)
    (found,) = torch.autograd.grad((rows.loss * weights).sum(), hidden)
    torch.testing.assert_close(rows.loss, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert found[3].abs().sum() == 0


def test_chances_and_likeliest_tokens() -> None:
    torch.manual_seed(1)
    head, hidden = Head(torch.randn(20, 6), 1.3, 4.0), torch.randn(9, 6)
    labels = torch.arange(9)
    labels[4] = NO_LABEL
    rows = head_loss(hidden, labels, head, chunk_rows=4)
    chances = (torch.tanh(hidden @ head.weight.T * 1.3 / 4) * 4).softmax(1)
    real = labels != NO_LABEL
    wanted = chances[real].gather(1, labels[real].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(rows.chance[real], wanted)
    assert torch.equal(rows.best[real], chances.argmax(1)[real])
    assert torch.equal(head_argmax(hidden, head, 4), chances.argmax(1))
    assert rows.chance[4] == rows.loss[4] == 0


def test_nothing_is_saved_where_no_gradient_is_wanted() -> None:
    rows = head_loss(torch.randn(3, 4), torch.arange(3), Head(torch.randn(5, 4)))
    assert not rows.loss.requires_grad


def test_dpace_by_hand() -> None:
    labels = torch.tensor([[5, 6, 7], [5, 6, NO_LABEL]])
    chance = torch.tensor([[0.5, 0.2, 1.0], [0.5, 0.2, 0.9]], requires_grad=True)
    weights = slot_weights(chance, labels)
    a, b, c = 0.75, 0.75 * 0.6, 0.75 * 0.6 * 1.0
    wanted = torch.tensor([[a + b + c, b + c, c], [a + b, b, 0.0]])
    torch.testing.assert_close(weights, wanted)
    assert not weights.requires_grad
