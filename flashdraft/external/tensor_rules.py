"""What vLLM and SGLang demand of a drafter's tensors: names, shapes and dtypes. Headers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashdraft.errors import CheckpointError, printable
from flashdraft.models.files.safetensors import SafetensorsFiles, open_safetensors

_DTYPES = ("BF16", "F16", "F32")
# what an engine takes from the target, or may find stored again
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
_SPECULATORS_EXTRAS = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_SECOND_GENERATION = ("candidate_selector.",)
_SHOWN = 3


def tensor_failures(
    folder: Path, config: Mapping[str, Any], engine: str, is_speculators: bool
) -> Iterator[tuple[str, str]]:
    """(rule, reason) for everything about the weights that the engine would refuse or misread."""
    try:
        source = open_safetensors(folder)
    except CheckpointError as error:
        yield "weights", str(error)
        return
    names = set(source.names())
    if any("mask_hidden" in name for name in names) and engine == "vllm":
        yield "mask_hidden", "There is a mask_hidden tensor; vLLM embeds mask_token_id and refuses."
    prefixed = sorted(name for name in names if name.startswith("model."))
    if prefixed and engine == "vllm":
        yield (
            "prefix",
            f"{printable(prefixed[0])} and {len(prefixed) - 1} more begin with 'model.'; vLLM "
            "adds that itself and finds no place for them.",
        )
        return
    num_layers = int(config["num_hidden_layers"])
    if num_layers > len(names):  # before anything is made for every layer
        yield "tensors", f"There are {len(names)} tensors for {num_layers} layers."
        return
    plain = {name.removeprefix("model."): name for name in names}
    wanted = expected_shapes(config)
    yield from _shape_failures(source, plain, wanted)
    reduced = config.get("draft_vocab_size") not in (None, config["vocab_size"])
    yield from _extra_failures(set(plain) - wanted.keys(), engine, is_speculators, bool(reduced))
    yield from _dtype_failures(source, config)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a drafter of this config must have."""
    hidden, inner, head = (
        int(config[key]) for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = int(config["num_attention_heads"]) * head
    keys = int(config["num_key_value_heads"]) * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(config["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(int(config["num_hidden_layers"])):
        prefix = f"layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "self_attn.q_norm.weight": (head,),
            prefix + "self_attn.k_norm.weight": (head,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _shape_failures(
    source: SafetensorsFiles,
    plain: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, str]]:
    missing = sorted(wanted.keys() - plain.keys())
    if missing:
        yield (
            "tensors",
            f"{_some(missing)} missing; the engine would not notice and draft with unset memory.",
        )
    for name in sorted(wanted.keys() & plain.keys()):
        actual = tuple(source.shape(plain[name]))
        if actual != wanted[name]:
            hint = " One column block per tap." if name == "fc.weight" else ""
            yield (
                "shapes",
                f"{plain[name]} has shape {list(actual)}; the config asks for "
                f"{list(wanted[name])}.{hint}",
            )


def _extra_failures(
    left: set[str], engine: str, is_speculators: bool, is_reduced: bool
) -> Iterator[tuple[str, str]]:
    allowed = set(_SPECULATORS_EXTRAS + _BORROWED) if is_speculators else set()
    if is_reduced:
        for name in ("d2t", "lm_head.weight"):
            if name not in left:
                yield "tensors", f"{name} is missing; a reduced vocabulary needs it."
    borrowed = sorted(left & set(_BORROWED) - allowed)
    if borrowed and engine == "vllm":
        yield (
            "borrowed",
            f"{_some(borrowed)} stored here; a drafter borrows them from its target, and vLLM "
            "would use these copies instead.",
        )
    unknown = sorted(
        name
        for name in left - allowed - set(_BORROWED)
        if not name.startswith(_SECOND_GENERATION)
        and "_conv." not in name
        and not name.endswith("inv_freq")
    )
    if unknown and engine == "vllm":
        yield "tensors", f"{_some(unknown)} not part of a drafter; vLLM refuses to load it."
    if unknown and engine == "sglang":
        yield "tensors", f"{_some(unknown)} not part of a drafter; SGLang would leave it out."


def _dtype_failures(
    source: SafetensorsFiles, config: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Mixed or unusual dtypes; a quantization_config may explain packed ones."""
    if config.get("quantization_config"):
        return
    floats = {source.dtype(name) for name in source.names() if name not in ("d2t", "t2d")}
    if floats - set(_DTYPES):
        yield (
            "dtype",
            f"Tensors are stored as {', '.join(sorted(floats))}; without a quantization_config "
            f"they must be {', '.join(_DTYPES)}.",
        )
    elif len(floats) > 1:
        yield "dtype", f"Tensors have several dtypes, {', '.join(sorted(floats))}; use one."


def _some(names: list[str]) -> str:
    shown = ", ".join(map(printable, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
