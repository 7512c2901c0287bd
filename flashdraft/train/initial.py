"""A new drafter for any target: its shape, its mask token, and weights that fit the target's scale.

How a drafter runs is models/drafter/model.py's business; how it learns, the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashdraft.errors import RequestError
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.head_config import (
    HEADS,
    MARKOV,
    SELECTOR,
    ConvolutionConfig,
    HeadConfig,
)
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.tokenizer import Tokenizer

NUM_LAYERS = 5
NUM_TAPS = 5
BLOCK_SIZE = 16
HEAD_RANK = 256

# Gemma's own layers are of two kinds and unusual widths: its drafters have plain ones
_GEMMA_HEAD_DIM, _GEMMA_KV_HEADS, _GEMMA_WINDOW, _GEMMA_THETA = 128, 8, 2048, 1e6
_CONVOLUTION = ConvolutionConfig(num_taps=2, group_size=16)  # as published drafters have them
_MASK_SPELLINGS = ("<mask>", "<|mask|>", "<|MASK|>", "[MASK]")
_SPARE_WORDS = ("reserved", "unused")


def new_drafter(
    target: ModelConfig,
    *,
    mask_token_id: int,
    layers: int = NUM_LAYERS,
    block_size: int = BLOCK_SIZE,
    taps: Sequence[int] | None = None,
    seed: int = 0,
) -> Drafter:
    """A drafter of random weights for this target, float32 on the CPU; see `calibrate`."""
    config = drafter_config(
        target, mask_token_id=mask_token_id, layers=layers, block_size=block_size, taps=taps
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Drafter(config)


def drafter_config(
    target: ModelConfig,
    *,
    mask_token_id: int,
    layers: int = NUM_LAYERS,
    block_size: int = BLOCK_SIZE,
    taps: Sequence[int] | None = None,
) -> DrafterConfig:
    """What a drafter for this target looks like."""
    num_target_layers = len(target.layers)
    if layers < 1:
        raise RequestError(f"The drafter's number of layers is {layers}; it must be at least 1.")
    chosen = spread_taps(num_target_layers) if taps is None else tuple(taps)
    outside = [tap for tap in chosen if not 0 <= tap < num_target_layers]
    if outside or len(set(chosen)) < len(chosen):
        raise RequestError(
            f"The taps are {list(chosen)}; they must be different layers of the target, which has "
            f"{num_target_layers}, counted from 0."
        )
    first = target.layers[0]
    heads, kv_heads, head_dim, rope = (
        first.num_heads,
        first.num_kv_heads,
        first.head_dim,
        first.rope,
    )
    inner = target.intermediate_size or 3 * target.hidden_size  # of experts alone: as published
    windows: tuple[int | None, ...] = (None,) * layers
    if target.family == "gemma":
        if target.hidden_size >= 8 * _GEMMA_HEAD_DIM:
            head_dim, kv_heads = _GEMMA_HEAD_DIM, _GEMMA_KV_HEADS
            # about 1.5 times the width: 64 heads for 31B, 32 for 26B-A4B
            heads = kv_heads * round(1.5 * target.hidden_size / head_dim / kv_heads)
        inner = 2 * target.hidden_size
        rope = RopeConfig(_GEMMA_THETA, head_dim, head_dim)
        windows = (_GEMMA_WINDOW,) * (layers - 1) + (None,)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_layers=layers,
        vocab_size=target.vocab_size,
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        rope=rope,
        windows=windows,
        causal=tuple(window is not None for window in windows),
        block_size=block_size,
        mask_token_id=mask_token_id,
        tap_layers=chosen,
        num_target_layers=num_target_layers,
        logit_softcap=target.logit_softcap,
    )


def add_head(drafter: Drafter, kind: str, rank: int) -> Drafter:
    """The same drafter with a head that says nothing yet: it drafts what it did.

    A selector comes with DFlash 2's convolutions, which change nothing yet either.
    """
    config = with_head(drafter.config, kind, rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = Drafter(config)
    missing, unknown = found.load_state_dict(drafter.state_dict(), strict=False)
    assert not unknown and all("head" in n or "selector" in n or "_conv" in n for n in missing)
    return found


def with_head(config: DrafterConfig, kind: str, rank: int) -> DrafterConfig:
    """What a drafter is with a head; refused where it has one already, or no room for one."""
    if kind not in HEADS:
        raise RequestError(f"The head is {kind!r}; it must be one of {', '.join(HEADS)}.")
    if rank < 1:
        raise RequestError(f"The head's rank is {rank}; it must be at least 1.")
    if config.head is not None:
        raise RequestError(
            f"The drafter has a {config.head.kind} head already; leave --head out to train it on."
        )
    if kind != SELECTOR:
        return replace(config, head=HeadConfig(kind, rank))
    if config.hidden_size % _CONVOLUTION.group_size:
        raise RequestError(
            f"The drafter's width is {config.hidden_size}; a selector's convolutions need a "
            f"multiple of {_CONVOLUTION.group_size}. Train a {MARKOV} head."
        )
    return replace(config, head=HeadConfig(kind, rank), convolution=_CONVOLUTION)


def spread_taps(num_layers: int, count: int = NUM_TAPS) -> tuple[int, ...]:
    """Target layers to read, evenly from the second to the third last, as published drafters do."""
    count = min(count, num_layers)
    if count == 1:
        return (num_layers // 2,)
    first, last = (1, num_layers - 3) if num_layers - 3 >= count else (0, num_layers - 1)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def choose_mask_token(target: ModelConfig, tokenizer: Tokenizer | None) -> int:
    """A token that no text holds, to stand for a slot not yet drafted."""
    if tokenizer is not None:
        for spelling in _MASK_SPELLINGS:
            if (index := tokenizer.token_id(spelling)) is not None:
                return index
        if tokenizer.vocab_size < target.vocab_size:  # the table's rows beyond the vocabulary
            return tokenizer.vocab_size
        if (index := _spare_token(target, tokenizer)) is not None:
            return index
        starting = (tokenizer.bos_id, tokenizer.token_id("<unk>"))
        for index in starting:  # it opens a text, and so is in no answer
            if index is not None and index not in target.eos_token_ids:
                return index
    elif target.bos_token_id is not None and target.bos_token_id not in target.eos_token_ids:
        return target.bos_token_id
    raise RequestError(
        f"{target.architecture} has no spare token for a slot not yet drafted; name one that its "
        "answers never hold, by id, with --mask-token."
    )


def calibrate(drafter: Drafter, taps: Tensor, final_norm: Tensor) -> None:
    """Fit fresh weights to the target: `taps` are rows of its features, [num_rows, taps * hidden].

    The tapped layers differ in scale by an order of magnitude; every one shall speak as loudly at
    first. The final norm prepares rows for the target's head, so it starts as the target's own.
    """
    config = drafter.config
    num_taps, hidden = len(config.tap_layers), config.hidden_size
    rows = taps.float().view(-1, num_taps, hidden).square().mean(-1).sqrt()  # [num_rows, taps]
    scale = rows.median(dim=0).values  # a few tokens are outliers far above the rest
    with torch.no_grad():
        weight = drafter.fc.weight.view(hidden, num_taps, hidden)
        unit = (num_taps * hidden) ** -0.5 / weight.std()
        weight *= (unit / scale.clamp_min(1e-6)).to(weight.device).view(1, num_taps, 1)
        drafter.norm.weight.copy_(final_norm)


def _spare_token(target: ModelConfig, tokenizer: Tokenizer) -> int | None:
    """A special token with no use in chats: one that says so, else the first."""
    used = {*target.eos_token_ids, target.bos_token_id, tokenizer.bos_id, tokenizer.eos_id}
    named = set(tokenizer.special_tokens.values())
    template = tokenizer.chat_template or ""
    spare = []
    for index in sorted(tokenizer.special_ids - used):
        spelling = tokenizer.decode([index], skip_special=False)
        if spelling not in named and spelling not in template and index < target.vocab_size:
            spare.append((index, spelling.lower()))
    marked = [index for index, text in spare if any(word in text for word in _SPARE_WORDS)]
    return marked[0] if marked else spare[0][0] if spare else None
