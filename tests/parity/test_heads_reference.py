"""Drafters with heads against the reference implementations: logits, paths, what heads add.

The recording is made by make_heads_fixture.py, which needs the references' own environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from flashdraft.kernels.draw.rule import DrawnRows, SlotSettings
from flashdraft.kernels.paths import SlotCandidates, follow, offer_paths
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.drafter.attention import attend_sequence
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.head_config import MARKOV, HeadConfig
from flashdraft.models.drafter.heads import ConfidenceHead, MarkovHead, score_paths
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.rope import Rope

FOLDER = Path(__file__).parent
RECORDING = load_file(FOLDER / "heads.safetensors")
DOCUMENT = json.loads((FOLDER / "heads.json").read_text())
CASES = list(DOCUMENT["cases"])
TOLERANCE = 1e-4
CPU = torch.device("cpu")


def part(prefix: str) -> dict[str, Tensor]:
    """The recorded tensors whose names begin so, in float32."""
    return {
        name.removeprefix(prefix): tensor.float()
        for name, tensor in RECORDING.items()
        if name.startswith(prefix)
    }


class Vocabulary:
    """The recording's embedding table, which has no scale of its own, and head."""

    forbidden: Tensor | None = None

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        rows = F.embedding(token_ids, part("target.")["embed_tokens.weight"])
        return rows if scale is None else rows * scale

    def unembed(self, normed: Tensor) -> Tensor:
        return F.linear(normed, part("target.")["lm_head.weight"])


def load(case: str) -> Drafter:
    drafter = Drafter(DrafterConfig.from_hf(DOCUMENT["cases"][case]))
    drafter.load_state_dict(part(f"drafter.{case}."))
    return drafter.eval()


def choose(packed: PackedDrafter, hidden: Tensor, logits: Tensor, anchor: Tensor) -> list[int]:
    """The chain of a greedy request."""
    count = packed.num_candidates
    top = logits.topk(count, dim=1)
    candidates = SlotCandidates(top.indices, top.values, logits.logsumexp(1))
    scores = packed.score_paths(hidden.unsqueeze(0), anchor.view(1), top.indices.unsqueeze(0))
    place = torch.arange(len(hidden))
    settings = SlotSettings.allocate(1, logits.shape[1], CPU)
    rows = DrawnRows(torch.zeros_like(place), place)
    offers = offer_paths(candidates, scores, settings, rows, 1)
    return follow(offers, len(hidden))[0][0].tolist()


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_and_paths_equal_the_reference(case: str) -> None:
    drafter, target = load(case), Vocabulary()
    packed = PackedDrafter(drafter, TorchKernels(CPU, torch.float32))
    rope, start = Rope(drafter.config.rope, CPU).table(64), 0
    for index, new in enumerate(DOCUMENT["new_tokens"]):
        start += new
        ids, places = RECORDING[f"block.{index}"], torch.arange(len(RECORDING[f"block.{index}"]))
        context, positions = drafter.context(RECORDING["taps"][:start]), start + places
        attend = attend_sequence(drafter, context, positions.unsqueeze(0), rope)
        for model in (drafter, packed):
            hidden = model.forward(drafter.embed(target, ids), attend, places)
            logits = model.logits(target, hidden)
            assert (logits - RECORDING[f"logits.{case}.{index}"]).abs().max() <= TOLERANCE
        path = choose(packed, hidden[1:], logits[1:], ids[0])
        assert path == RECORDING[f"path.{case}.{index}"].tolist()


def test_the_paths_are_not_the_likeliest_tokens() -> None:
    """The selector matters in the recording, so that agreement means something."""
    for case in CASES:
        for index in range(len(DOCUMENT["new_tokens"])):
            likeliest = RECORDING[f"logits.{case}.{index}"][1:].argmax(1)
            if likeliest.tolist() != RECORDING[f"path.{case}.{index}"].tolist():
                break
        else:
            pytest.fail(f"every path of {case} is that of the likeliest tokens")


@pytest.mark.parametrize("sees_token", [False, True])
@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@torch.inference_mode()
def test_markov_and_confidence_heads_equal_the_reference(kind: str, sees_token: bool) -> None:
    hidden, before = RECORDING["markov.hidden"], RECORDING["markov.before"]
    size, vocab = hidden.shape[2], len(RECORDING[f"markov.{kind}.weights.markov_w1.weight"])
    settings = DOCUMENT["rank"], vocab, kind == "gated", True, sees_token
    config = HeadConfig(MARKOV, *settings)
    head, confidence = MarkovHead(config, size, vocab, vocab), ConfidenceHead(config, size)
    head.load_state_dict(part(f"markov.{kind}.weights."))
    name = f"markov.{kind}.{'token' if sees_token else 'row'}"
    confidence.load_state_dict(part(f"{name}.weights."))
    everything = torch.arange(vocab).expand(1, hidden.shape[1], -1)
    scores = score_paths(head, confidence, hidden, before.unsqueeze(2), everything)
    assert scores.sure is not None
    assert (scores.added[0, :, 0] - RECORDING[f"markov.{kind}.bias"]).abs().max() <= TOLERANCE
    assert (scores.sure[0, :, 0] - RECORDING[f"{name}.sure"]).abs().max() <= TOLERANCE
