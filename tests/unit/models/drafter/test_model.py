"""The drafter's model. Its numbers are checked against the reference in tests/parity."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.drafter.attention import attend_sequence, visible_block, visible_context
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.rope import Rope

CPU = torch.device("cpu")
TINY = DrafterConfig(
    hidden_size=24,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_layers=2,
    vocab_size=50,
    max_position=64,
    norm_eps=1e-6,
    rope=RopeConfig(10000.0, 8, 8),
    windows=(5, None),
    causal=(True, False),
    block_size=4,
    mask_token_id=3,
    tap_layers=(0, 2, 3),
    num_target_layers=6,
)


class Vocabulary:
    """A target's embedding table and head."""

    forbidden: Tensor | None = None

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.table = torch.randn(TINY.vocab_size, TINY.hidden_size)

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        return self.table[token_ids] * (10.0 if scale is None else scale)

    def unembed(self, normed: Tensor) -> Tensor:
        return normed @ self.table.T


def tiny_drafter(config: DrafterConfig = TINY) -> Drafter:
    torch.manual_seed(2)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        else:
            parameter.data = torch.randn_like(parameter) * parameter.shape[1] ** -0.5
    return drafter


def run(drafter: Drafter, taps: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Final hidden rows of blocks at these positions."""
    rope = Rope(drafter.config.rope, CPU).table(64)
    attend = attend_sequence(drafter, drafter.context(taps), positions, rope)
    return drafter(drafter.embed(Vocabulary(), ids.flatten()), attend)


class TestDrafter:
    def test_every_parameter_gets_a_gradient(self) -> None:
        drafter = tiny_drafter()
        positions = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
        hidden = run(drafter, torch.randn(12, 72), positions, torch.full((2, 4), 3))
        drafter.logits(Vocabulary(), hidden).square().sum().backward()
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name

    @torch.inference_mode()
    def test_blocks_together_equal_blocks_alone(self) -> None:
        """Also: a block sees nothing of the context from its anchor on."""
        drafter, taps = tiny_drafter(), torch.randn(20, 72)
        anchors = [2, 9, 10, 16]
        positions = torch.tensor([[anchor + k for k in range(4)] for anchor in anchors])
        ids = torch.tensor([[anchor, 3, 3, 3] for anchor in anchors])
        together = run(drafter, taps, positions, ids).view(4, 4, -1)
        for block, anchor in enumerate(anchors):
            alone = run(drafter, taps[:anchor], positions[[block]], ids[block])
            torch.testing.assert_close(together[block], alone, rtol=1e-4, atol=1e-5)

    @torch.inference_mode()
    def test_a_causal_drafter_ignores_later_slots(self) -> None:
        taps, positions = torch.randn(6, 72), torch.arange(6, 10).unsqueeze(0)
        ids, other = torch.tensor([[7, 3, 3, 3]]), torch.tensor([[7, 3, 3, 9]])
        for causal in (True, False):
            drafter = tiny_drafter(replace(TINY, causal=(causal, causal)))
            first, second = (run(drafter, taps, positions, row)[:3] for row in (ids, other))
            assert torch.allclose(first, second, atol=1e-6) == causal

    @torch.inference_mode()
    def test_packed_context_rows_equal_the_layers_own(self) -> None:
        drafter, taps = tiny_drafter(), torch.randn(5, 72)
        packed = PackedDrafter(drafter, TorchKernels(CPU, torch.float32))
        context = packed.context(taps)
        torch.testing.assert_close(context, drafter.context(taps))
        rows = packed.context_kv(context)
        assert rows.shape == (2, 5, packed.context_spec(0).width) and rows[1].is_contiguous()
        for layer in range(2):
            torch.testing.assert_close(rows[layer], drafter.context_kv(layer, context))

    def test_specs_say_what_the_rows_hold(self) -> None:
        packed = PackedDrafter(tiny_drafter(), TorchKernels(CPU, torch.float32))
        block, context = packed.qkv_spec(1), packed.context_spec(1)
        assert (block.width, context.width) == (8 * 8, 4 * 8)
        assert context.num_heads == 0 and context.q_norm is None
        assert block.k_norm is context.k_norm

    def test_embedding_scale_is_the_targets_or_the_drafters(self) -> None:
        target, ids = Vocabulary(), torch.tensor([4, 3])
        own = tiny_drafter(replace(TINY, embed_scale=1.0))
        torch.testing.assert_close(tiny_drafter().embed(target, ids), target.table[ids] * 10)
        torch.testing.assert_close(own.embed(target, ids), target.table[ids])

    @torch.inference_mode()
    def test_reduced_vocabulary(self) -> None:
        config = replace(TINY, draft_vocab_size=5, output_multiplier=2.0, logit_softcap=1.5)
        drafter = tiny_drafter(config)
        chosen = torch.tensor([0, 7, 8, 20, 49])
        assert drafter.d2t is not None and drafter.lm_head is not None
        drafter.d2t.copy_(chosen - torch.arange(5))
        packed = PackedDrafter(drafter, TorchKernels(CPU, torch.float32))
        hidden = torch.randn(3, 24)
        expected = 1.5 * torch.tanh(hidden @ drafter.lm_head.weight.T * 2.0 / 1.5)
        for model in (drafter, packed):
            torch.testing.assert_close(model.logits(Vocabulary(), hidden), expected)
        target = Vocabulary()
        target.forbidden = torch.zeros(TINY.vocab_size, dtype=torch.bool)
        target.forbidden[[7, 11, 49]] = True
        expected[:, [1, 4]] = -torch.inf
        torch.testing.assert_close(packed.logits(target, hidden), expected)
        assert packed.target_ids(torch.tensor([4, 0, 1])).tolist() == [49, 0, 7]


def test_visibility_by_hand() -> None:
    """Anchor 5, rows 5..8, window 3."""
    rows, anchor = torch.arange(5, 9).unsqueeze(1), torch.full((4, 1), 5)
    context = visible_context(rows, anchor, torch.arange(8), 3)
    seen = [row.nonzero().flatten().tolist() for row in context]
    assert seen == [[3, 4], [4], [], []]
    assert visible_context(rows, anchor, torch.arange(8), None).sum() == 4 * 5
    keys = torch.arange(5, 9)
    causal = visible_block(rows, keys, causal=True, window=3).int().tolist()
    assert causal == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    both = visible_block(rows, keys, causal=False, window=3).int().tolist()
    assert both == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    assert visible_block(rows, keys, causal=False, window=None).all()
