"""The drafter against the reference implementation: recorded logits, several steps with a cache.

The recording is made by make_dflash_fixture.py, which needs the reference's own environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from flashdraft.kernels.interface import BIDIRECTIONAL, CAUSAL, Heads, PagedKeys, PageView
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.drafter.attention import attend_sequence
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.rope import Rope

FOLDER = Path(__file__).parent
RECORDING = load_file(FOLDER / "dflash_0_1_0.safetensors")
DOCUMENT = json.loads((FOLDER / "dflash_0_1_0.json").read_text())
CASES = list(DOCUMENT["cases"])
TOLERANCE = 1e-4
PAGE_SIZE = 4


class Vocabulary:
    """The recording's embedding table, which has no scale of its own, and head."""

    forbidden: Tensor | None = None

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        rows = F.embedding(token_ids, RECORDING["target.embed_tokens.weight"].float())
        return rows if scale is None else rows * scale

    def unembed(self, normed: Tensor) -> Tensor:
        return F.linear(normed, RECORDING["target.lm_head.weight"].float())


class Step(NamedTuple):
    start: int  # the anchor's position
    new: int  # tokens committed since the last step
    ids: Tensor
    logits: Tensor  # the reference's


def load(case: str) -> Drafter:
    drafter = Drafter(DrafterConfig.from_hf(DOCUMENT["cases"][case]))
    prefix = "drafter."
    weights = {k.removeprefix(prefix): v for k, v in RECORDING.items() if k.startswith(prefix)}
    drafter.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return drafter.eval()


def steps(case: str) -> Iterator[Step]:
    start = 0
    for index, new in enumerate(DOCUMENT["new_tokens"]):
        start += new
        yield Step(start, new, RECORDING[f"block.{index}"], RECORDING[f"logits.{case}.{index}"])


def test_the_cases_differ() -> None:
    """Every mask and scale of the recording matters, so that agreement means something."""
    for index in range(1, len(CASES)):
        for earlier in CASES[:index]:
            first, second = (RECORDING[f"logits.{name}.1"] for name in (earlier, CASES[index]))
            assert (first - second).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_dense_logits_equal_the_reference(case: str) -> None:
    drafter, target = load(case), Vocabulary()
    rope = Rope(drafter.config.rope, torch.device("cpu")).table(64)
    for step in steps(case):
        context = drafter.context(RECORDING["taps"][: step.start])
        positions = torch.arange(step.start, step.start + len(step.ids))
        attend = attend_sequence(drafter, context, positions.unsqueeze(0), rope)
        hidden = drafter(drafter.embed(target, step.ids), attend)
        assert (drafter.logits(target, hidden) - step.logits).abs().max() <= TOLERANCE


class PagedDraft:
    """One sequence's draft steps over pages in a scrambled order."""

    def __init__(self, drafter: PackedDrafter) -> None:
        config = drafter.config
        self.drafter = drafter
        self.pages = torch.tensor([[5, 2, 9, 0, 7, 11, 3, 10, 1, 8, 4, 6]], dtype=torch.int32)
        shape = (config.num_layers, 12, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        # a slot that nobody wrote must never be read
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.rope = drafter.rope.table(64)

    def slots(self, positions: Tensor) -> Tensor:
        page = self.pages[0, positions // PAGE_SIZE].long()
        return page * PAGE_SIZE + positions % PAGE_SIZE

    def fold(self, taps: Tensor, first: int) -> None:
        """Write the context K/V of newly committed tokens over what the last block left there."""
        positions = torch.arange(first, first + taps.shape[0])
        rows = self.drafter.context_kv(self.drafter.context(taps))
        for layer in range(self.drafter.config.num_layers):
            spec = self.drafter.context_spec(layer)
            self.drafter.kernels.prepare_qkv(
                rows[layer],
                Heads(spec, self.rope, positions),
                self.keys[layer],
                self.values[layer],
                self.slots(positions),
            )

    def draft(self, embeddings: Tensor, start: int) -> Tensor:
        num_rows = embeddings.shape[0]
        positions = torch.arange(start, start + num_rows)
        config, kernels = self.drafter.config, self.drafter.kernels
        view = PageView(
            query_start=torch.tensor([0, num_rows], dtype=torch.int32),
            context_lens=torch.tensor([start], dtype=torch.int32),
            block_table=self.pages,
            slots=self.slots(positions),
            page_size=PAGE_SIZE,
            max_query_len=num_rows,
            max_key_len=start + num_rows,
        )

        def attend(layer: int, qkv: Tensor) -> Tensor:
            cache = self.keys[layer], self.values[layer]
            query = kernels.prepare_qkv(
                qkv, Heads(self.drafter.qkv_spec(layer), self.rope, positions), *cache, view.slots
            )
            return kernels.attention(
                query,
                PagedKeys(
                    *cache,
                    view,
                    scale=config.head_dim**-0.5,
                    window=config.windows[layer],
                    mask=CAUSAL if config.causal[layer] else BIDIRECTIONAL,
                ),
            )

        return self.drafter.forward(embeddings, attend)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_paged_logits_equal_the_reference(case: str) -> None:
    packed = PackedDrafter(load(case), TorchKernels(torch.device("cpu"), torch.float32))
    paged, target = PagedDraft(packed), Vocabulary()
    for step in steps(case):
        first = step.start - step.new
        paged.fold(RECORDING["taps"][first : step.start], first)
        hidden = paged.draft(packed.embed(target, step.ids), step.start)
        assert (packed.logits(target, hidden) - step.logits).abs().max() <= TOLERANCE
