"""Training on a real GPU: flex attention, the loss kernel and a whole step against references.

`pytest tests/gpu/test_train_gpu.py` compiles for a minute or two.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdraft.kernels.select import select_kernels
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.drafter.attention import BlockLayout, _attend
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter
from flashdraft.train.data.answers import Answer, AnswerSet
from flashdraft.train.evaluate import evaluate_offline
from flashdraft.train.fit.batches import NO_LABEL, BatchPlan, PackedBatch, prefetch
from flashdraft.train.fit.features import TargetFeatures
from flashdraft.train.fit.loss import Head, head_loss, loss_rows
from flashdraft.train.fit.step import TrainingStep
from tests import zoo

pytestmark = pytest.mark.gpu
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BF16 = torch.bfloat16
KINDS = [(False, None), (True, 200), (False, 70)]


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    """Every kind of mask is another compilation, and torch gives up after some."""
    torch._dynamo.reset()


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm())


def make_answers(count: int, mean_length: int) -> AnswerSet:
    random = np.random.default_rng(3)
    answers = []
    for _ in range(count):
        tokens = random.integers(4, zoo.VOCAB, int(random.integers(12, 2 * mean_length))).tolist()
        answers.append(Answer(tokens[: len(tokens) // 4], tokens[len(tokens) // 4 :]))
    return AnswerSet.from_answers(answers)


def make_batches(
    num_rows: int, num_blocks: int, block_size: int, device: torch.device = CUDA
) -> list[PackedBatch]:
    answers = make_answers(3 * num_rows // 150, 150)
    plan = BatchPlan(
        answers, max_rows=num_rows, num_blocks=num_blocks, block_size=block_size, seed=1
    )
    return list(prefetch(plan.batches(0), device))


@pytest.mark.parametrize(("causal", "window"), KINDS)
@pytest.mark.parametrize("heads", [(9, 3), (8, 1), (4, 4)])
def test_flex_attention_equals_dense(
    causal: bool, window: int | None, heads: tuple[int, int]
) -> None:
    """Outputs and all three gradients, over documents side by side."""
    batch = make_batches(1024, 96, 16)[0]
    starts = batch.anchors - batch.positions[batch.anchors]
    layout = BlockLayout(1024, 16, starts, batch.anchors)
    torch.manual_seed(0)
    query = torch.randn(96 * 16, heads[0], 64, device=CUDA)
    key, value = torch.randn(2, 1024 + 96 * 16, heads[1], 64, device=CUDA)
    upstream = torch.randn_like(query)
    results = []
    for mask, dtype in (
        (layout.tile_mask(causal, window), BF16),
        (layout.dense_mask(causal, window), torch.float32),
    ):
        leaves = [x.to(BF16).to(dtype).requires_grad_() for x in (query, key, value)]
        mixed = _attend(*leaves, mask, 0.125)
        mixed.backward(upstream.to(dtype))
        results.append([mixed, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert not found.isnan().any() and relative(found, expected) < 1e-2


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("vocab_size", [49152, 1000])
def test_loss_kernel_equals_the_reference(vocab_size: int, cap: float | None) -> None:
    from flashdraft.kernels.cuda import loss as triton_loss

    torch.manual_seed(0)
    logits = (6 * torch.randn(300, vocab_size, device=CUDA)).to(BF16)
    labels = torch.randint(0, vocab_size, (300,), device=CUDA)
    labels[::7] = NO_LABEL
    logits[torch.arange(1, 300, 3), labels[1::3].clamp(min=0)] += 20  # sure of itself
    results = []
    for fused in (True, False):
        rows = logits.clone() if fused else logits.float()
        out = [torch.empty(300, device=CUDA), torch.empty(300, device=CUDA)]
        best = torch.empty(300, device=CUDA, dtype=torch.int64)
        if fused:
            triton_loss.loss_rows(rows, labels, 1.2, cap, *out, best)
        else:
            loss_rows(rows, labels, Head(logits, 1.2, cap), *out, best)
        results.append((rows, *out, best))
    (rows, loss, chance, best), (wanted, *expected, wanted_best) = results
    torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chance, expected[1], rtol=1e-3, atol=1e-6)
    assert relative(rows, wanted) < 5e-3
    if cap is None:  # a cap makes new ties
        assert torch.equal(best, wanted_best)


def test_the_fused_loss_holds_one_chunk_of_logits() -> None:
    vocab_size, chunk = 49152, 1024
    hidden = torch.randn(16 * chunk, 576, device=CUDA, dtype=BF16, requires_grad=True)
    labels = torch.randint(0, vocab_size, (16 * chunk,), device=CUDA)
    head = Head(torch.randn(vocab_size, 576, device=CUDA, dtype=BF16) / 24)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rows = head_loss(hidden, labels, head, chunk_rows=chunk)
    rows.loss.mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * chunk * vocab_size * 2 + 8 * hidden.numel() * 2
    part = slice(5 * chunk, 5 * chunk + 64)
    leaf = hidden[part].detach().float().requires_grad_()
    torch.nn.functional.cross_entropy(
        leaf @ head.weight.float().T, labels[part], reduction="sum"
    ).backward()
    assert hidden.grad is not None and leaf.grad is not None
    assert relative(hidden.grad[part] * len(labels), leaf.grad) < 1e-2


def make_pair(device: torch.device, dtype: str) -> tuple[TrainingStep, Drafter]:
    target = zoo.tiny_target("llama", select_kernels(device, dtype), taps=(0, 2))
    config: DrafterConfig = zoo.tiny_drafter(zoo.kernels("torch"), 16).config
    config = replace(config, head_dim=32, rope=RopeConfig(10000.0, 32, 32), windows=(100, None))
    torch.manual_seed(0)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.data = torch.randn_like(parameter) * parameter.shape[1] ** -0.5
    drafter = drafter.to(device)
    compile = device.type == "cuda"
    return TrainingStep(drafter, target, max_rows=512, compile=compile), drafter


def test_a_compiled_step_equals_the_cpu_and_is_compiled_once() -> None:
    """bf16 on the GPU against float32 on the CPU, over batches of different documents."""
    ours, drafter = make_pair(CUDA, "bfloat16")
    theirs, reference = make_pair(CPU, "float32")
    batches = make_batches(512, 64, 16)
    assert len(batches) > 2 and len({len(batch.lengths) for batch in batches}) > 1
    for number, batch in enumerate(batches):
        if number == 1:
            torch._dynamo.config.error_on_recompile = True
        try:
            report, expected = ours.backward(batch), theirs.backward(batch.to(CPU))
        finally:
            torch._dynamo.config.error_on_recompile = False
        assert float(report.loss) == pytest.approx(float(expected.loss), rel=2e-2)
        assert torch.equal(report.slot_count.cpu(), expected.slot_count)
    for (name, found), wanted in zip(
        drafter.named_parameters(), reference.parameters(), strict=True
    ):
        assert found.grad is not None and wanted.grad is not None
        assert found.grad.dtype == torch.float32
        assert relative(found.grad.cpu(), wanted.grad) < 0.1, name
    agreed = ours.predict(batches[0]).cpu() == theirs.predict(batches[0].to(CPU))
    assert agreed.float().mean() > 0.9


def test_features_equal_the_cpu() -> None:
    (batch, *_) = make_batches(512, 64, 16)
    ours = zoo.tiny_target("llama", select_kernels(CUDA, "bfloat16"), taps=(0, 2))
    theirs = zoo.tiny_target("llama", select_kernels(CPU, "float32"), taps=(0, 2))
    found = TargetFeatures(ours, 512).run(batch)
    expected = TargetFeatures(theirs, 512).run(batch.to(CPU))
    assert relative(found.cpu(), expected) < 2e-2


def test_offline_evaluation_runs() -> None:
    step, _ = make_pair(CUDA, "bfloat16")
    answers = make_answers(10, 100)
    for max_tokens in (None, 60):
        result = evaluate_offline(step, answers, max_rows=512, num_blocks=64, max_tokens=max_tokens)
        assert [r.tokens for r in result.requests] == (answers.answer_lengths - 1).tolist()
