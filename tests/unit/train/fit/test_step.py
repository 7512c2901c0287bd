"""A training step: features, masks, labels and gradients, against the engine and plain autograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdraft.errors import TrainingError, UnsupportedModelError
from flashdraft.kernels.interface import CAUSAL, Heads, PagedKeys, PageView
from flashdraft.models.drafter.attention import attend_sequence
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import ForwardBatch, LayerCache, Target
from flashdraft.models.rope import Rope
from flashdraft.train.data.answers import Answer, AnswerSet
from flashdraft.train.fit.batches import NO_LABEL, BatchPlan, PackedBatch
from flashdraft.train.fit.features import TargetFeatures
from flashdraft.train.fit.loss import slot_weights
from flashdraft.train.fit.step import TrainingStep
from tests import zoo

MAX_ROWS, BLOCK_SIZE = 160, 8
KERNELS = zoo.kernels("torch")


def make_target(family: str = "llama") -> Target:
    return zoo.tiny_target(family, KERNELS, taps=(0, 2))


def make_drafter(**changes: object) -> Drafter:
    """One sliding causal and one full layer, with weights of some size."""
    torch.manual_seed(4)
    drafter = Drafter(replace(zoo.tiny_drafter(KERNELS, BLOCK_SIZE).config, **changes))
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.data = torch.randn_like(parameter) * parameter.shape[1] ** -0.5
    return drafter


def make_answers(count: int = 14) -> AnswerSet:
    random = np.random.default_rng(3)
    return AnswerSet.from_answers(
        [
            Answer(
                random.integers(4, zoo.VOCAB, int(random.integers(1, 12))).tolist(),
                random.integers(4, zoo.VOCAB, int(random.integers(2, 40))).tolist(),
            )
            for _ in range(count)
        ]
    )


def make_batch(num_blocks: int = 24) -> PackedBatch:
    plan = BatchPlan(
        make_answers(), max_rows=MAX_ROWS, num_blocks=num_blocks, block_size=BLOCK_SIZE, seed=1
    )
    return next(plan.batches(0))


def run_alone(target: Target, token_ids: Tensor) -> Tensor:
    """Taps of one document by itself, every layer with its own cache."""
    count = len(token_ids)
    view = PageView(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.zeros(1, dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slots=torch.arange(count),
        page_size=512,
        max_query_len=count,
        max_key_len=count,
    )
    caches = [
        LayerCache(*torch.zeros(2, 1, 512, layer.num_kv_heads, layer.head_dim), view)
        for layer in target.config.cached_layers
    ]
    output = target.forward(token_ids, ForwardBatch(torch.arange(count), count, caches, CAUSAL))
    assert output.taps is not None
    return output.taps


@pytest.mark.parametrize("family", list(zoo.CONFIGS))
def test_features_of_packed_documents_equal_those_of_each_alone(family: str) -> None:
    target, batch = make_target(family), make_batch()
    features = TargetFeatures(target, MAX_ROWS).run(batch)
    assert features.shape == (MAX_ROWS, 64)
    assert (features[batch.documents < 0] == 0).all()
    for document in range(len(batch.lengths)):
        rows = batch.documents == document
        torch.testing.assert_close(features[rows], run_alone(target, batch.token_ids[rows]))


def test_a_target_without_taps_is_refused() -> None:
    with pytest.raises(TrainingError, match="taps"):
        TargetFeatures(zoo.tiny_target("llama", KERNELS), MAX_ROWS)


def block_alone(
    drafter: Drafter, target: Target, batch: PackedBatch, taps: Tensor, block: int
) -> Tensor:
    """Logits of one block's slots from its own document alone, cut before the anchor."""
    anchor = int(batch.anchors[block])
    document, position = batch.documents[anchor], int(batch.positions[anchor])
    before = (batch.documents == document) & (batch.positions < position)
    ids = torch.tensor([int(batch.token_ids[anchor])] + [3] * (BLOCK_SIZE - 1))
    positions = torch.arange(position, position + BLOCK_SIZE).unsqueeze(0)
    rope = Rope(drafter.config.rope, torch.device("cpu")).table(512)
    attend = attend_sequence(drafter, drafter.context(taps[before]), positions, rope)
    hidden = drafter(drafter.embed(target, ids), attend)
    return drafter.logits(target, hidden[1:])


def test_loss_and_gradients_equal_plain_autograd_over_single_blocks() -> None:
    target, batch = make_target(), make_batch()
    drafter = make_drafter(logit_softcap=3.0, output_multiplier=1.5)
    step = TrainingStep(drafter, target, max_rows=MAX_ROWS, chunk_rows=17)
    report = step.backward(batch, scale=0.5)
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    taps = step.features.run(batch)
    logits = torch.stack([block_alone(drafter, target, batch, taps, b) for b in range(24)])
    logs = logits.log_softmax(-1)
    own = logs.gather(2, batch.labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    is_labelled = batch.labels != NO_LABEL
    weights = slot_weights(own.exp() * is_labelled, batch.labels)
    loss = -(own * weights).sum() / weights.sum()
    (loss * 0.5).backward()
    torch.testing.assert_close(report.loss, loss.detach())
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
    correct = (logits.argmax(-1) == batch.labels) & is_labelled
    assert torch.equal(report.slot_correct, correct.sum(0))
    assert torch.equal(report.slot_count, is_labelled.sum(0))
    torch.testing.assert_close(report.slot_chance, (own.exp() * is_labelled).sum(0).detach())
    assert torch.equal(step.predict(batch), logits.argmax(-1))


def test_blocks_are_what_the_engine_drafts() -> None:
    """The engine's own packed drafter, over pages, drafts the same tokens at the same anchor."""
    target, batch, drafter = make_target(), make_batch(), make_drafter()
    predicted = TrainingStep(drafter, target, max_rows=MAX_ROWS).predict(batch)
    packed = PackedDrafter(drafter, KERNELS)
    taps = TargetFeatures(target, MAX_ROWS).run(batch)
    for block in (0, 11, 23):
        anchor = int(batch.anchors[block])
        position = int(batch.positions[anchor])
        first = anchor - position
        shape = (2, 2, 1, 512, packed.config.num_kv_heads, packed.config.head_dim)
        pages = torch.zeros(shape)
        rope = packed.rope.table(512)
        if position:
            rows = packed.context_kv(packed.context(taps[first:anchor]))
            for layer in range(2):
                KERNELS.prepare_qkv(
                    rows[layer],
                    Heads(packed.context_spec(layer), rope, torch.arange(position)),
                    pages[0, layer],
                    pages[1, layer],
                    torch.arange(position),
                )
        places = torch.arange(position, position + BLOCK_SIZE)
        view = PageView(
            torch.tensor([0, BLOCK_SIZE], dtype=torch.int32),
            torch.tensor([position], dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
            places,
            512,
            BLOCK_SIZE,
            position + BLOCK_SIZE,
        )

        def attend(layer: int, qkv: Tensor, view: PageView = view, pages: Tensor = pages) -> Tensor:
            keys, values, spec = pages[0, layer], pages[1, layer], packed.qkv_spec(layer)
            query = KERNELS.prepare_qkv(
                qkv, Heads(spec, packed.rope.table(512), view.slots), keys, values, view.slots
            )
            return KERNELS.attention(
                query,
                PagedKeys(
                    keys,
                    values,
                    view,
                    scale=spec.head_dim**-0.5,
                    window=packed.config.windows[layer],
                    mask=replace(CAUSAL, causal=packed.config.causal[layer]),
                ),
            )

        ids = torch.tensor([int(batch.token_ids[anchor])] + [3] * (BLOCK_SIZE - 1))
        hidden = packed.forward(packed.embed(target, ids), attend)
        assert torch.equal(packed.logits(target, hidden[1:]).argmax(-1), predicted[block])


def test_the_drafter_is_traced_whole_and_once() -> None:
    """What is compiled on a GPU holds nothing that breaks the graph or differs between batches."""
    target, drafter = make_target(), make_drafter()
    plan = BatchPlan(
        make_answers(40), max_rows=MAX_ROWS, num_blocks=16, block_size=BLOCK_SIZE, seed=2
    )
    batches = list(plan.batches(0))[:3]
    assert len({len(batch.lengths) for batch in batches}) > 1
    plain = TrainingStep(drafter, target, max_rows=MAX_ROWS)
    traced = TrainingStep(drafter, target, max_rows=MAX_ROWS)
    traced._run = torch.compile(traced._hidden, dynamic=False, fullgraph=True, backend="aot_eager")
    torch._dynamo.config.error_on_recompile = True
    try:
        for batch in batches:
            found, expected = traced.backward(batch), plain.backward(batch)
            torch.testing.assert_close(found.loss, expected.loss)
    finally:
        torch._dynamo.config.error_on_recompile = False


def test_one_batch_can_be_learnt() -> None:
    target, batch, drafter = make_target(), make_batch(num_blocks=8), make_drafter()
    step = TrainingStep(drafter, target, max_rows=MAX_ROWS)
    features = step.features.run(batch)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        losses.append(float(step.backward(batch, features).loss))
        optimizer.step()
        optimizer.zero_grad()
    report = step.backward(batch, features)
    assert float(report.loss) < 0.1 * losses[0]
    assert report.slot_correct.sum() > 0.95 * report.slot_count.sum()


def test_a_reduced_vocabulary_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="reduced vocabulary of 20"):
        TrainingStep(make_drafter(draft_vocab_size=20), make_target(), max_rows=MAX_ROWS)


def test_a_block_cut_short_does_not_see_what_was_cut_off() -> None:
    """Its loss is that of a drafter with so short a block, on the same rows."""
    target, batch, drafter = make_target(), make_batch(), make_drafter()
    widths = torch.full((len(batch.anchors),), 4)
    step = TrainingStep(drafter, target, max_rows=MAX_ROWS)
    cut = step.backward(batch.cut(widths))
    drafts = step.predict(batch, widths=widths)[:, :3]
    labels = batch.labels[:, :3]
    expected = ((drafts == labels) & (labels != NO_LABEL)).sum(0)
    assert cut.slot_correct.tolist() == [*expected.tolist(), *[0] * (BLOCK_SIZE - 4)]
    assert cut.slot_count.tolist()[3:] == [0] * (BLOCK_SIZE - 4)
    whole = step.backward(batch)
    assert not torch.equal(cut.slot_chance[:3], whole.slot_chance[:3]), "a block sees its rows"
