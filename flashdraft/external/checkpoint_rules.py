"""What vLLM and SGLang demand of a drafter's folder, rule by rule, with a reason for each failure.

Both published layouts are known: z-lab's, which both engines read, and speculators', which only
vLLM does. Rules are those of vLLM 0.32 and SGLang 0.5.23. Only headers of weights are read; whether
flashdraft itself can run the drafter is models/drafter/loading.py's question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from flashdraft.external.tensor_rules import tensor_failures
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.files.opening import read_json

BOTH = ("vllm", "sglang")
ZLAB, SPECULATORS = "zlab", "speculators"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ARCHITECTURES = {
    "vllm": ("DFlashDraftModel", "DFlash2DraftModel"),
    "sglang": ("DFlashDraftModel", "DFlash2DraftModel"),
}
_DECODER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
)


class RuleFinding(NamedTuple):
    """A rule that the folder breaks, or a limit that it runs into, in one engine."""

    engine: str
    rule: str
    reason: str


@dataclass(frozen=True)
class FolderReport:
    """What the engines would make of a folder."""

    folder: Path
    layout: str
    engines: tuple[str, ...]  # those that read this layout at all
    failures: tuple[RuleFinding, ...]
    limits: tuple[RuleFinding, ...]  # it loads, but not everywhere or not as well

    def passes(self, engine: str) -> bool:
        """Whether this engine would load it."""
        return engine in self.engines and all(one.engine != engine for one in self.failures)

    @property
    def is_servable(self) -> bool:
        """Whether every engine that reads the layout would load it."""
        return all(map(self.passes, self.engines))


def check_folder(folder: Path, target: ModelConfig | None = None) -> FolderReport:
    """Hold a drafter's folder against both engines' rules; with a target, against that too."""
    raw = read_json(folder / "config.json")
    is_speculators = "speculators_model_type" in raw
    layout = SPECULATORS if is_speculators else ZLAB
    engines = ("vllm",) if is_speculators else BOTH
    config = _flattened(raw) if is_speculators else _zlab_values(raw)
    failures = list(_speculators_rules(raw) if is_speculators else _zlab_rules(raw))
    failures += _shared_rules(config, engines)
    failures += _fit_rules(config, target, engines)
    if not failures:  # shapes follow from a config that holds together
        for engine in engines:
            for rule, reason in tensor_failures(folder, config, engine, is_speculators):
                failures.append(RuleFinding(engine, rule, reason))
    if is_speculators:
        failures.append(
            RuleFinding(
                "sglang",
                "layout",
                "SGLang does not read speculators' layout; export with --layout zlab.",
            )
        )
    limits = tuple(_limits(raw, config, engines))
    return FolderReport(folder, layout, engines, tuple(dict.fromkeys(failures)), limits)


def _zlab_values(raw: Mapping[str, Any]) -> dict[str, Any]:
    """z-lab's config with what stands in dflash_config lifted beside the rest."""
    options = raw.get("dflash_config")
    lifted = {k: v for k, v in (options or {}).items() if v is not None} if _is(options) else {}
    return {**raw, **lifted}


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """speculators' config in z-lab's words, as vLLM translates it."""
    decoder = raw.get("transformer_layer_config")
    taps = raw.get("aux_hidden_state_layer_ids")
    lowered = [tap - 1 for tap in taps] if _are_integers(taps) else taps
    return {
        **(decoder if _is(decoder) else {}),
        "architectures": ["DFlashDraftModel"],
        "block_size": raw.get("block_size"),
        "mask_token_id": raw.get("mask_token_id"),
        "target_layer_ids": lowered,
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "quantization_config": raw.get("quantization_config"),
        "auto_map": raw.get("auto_map"),
    }


def _zlab_rules(raw: Mapping[str, Any]) -> Iterator[RuleFinding]:
    names = raw.get("architectures")
    for engine, known in _ARCHITECTURES.items():
        if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
            yield RuleFinding(
                engine,
                "architectures",
                f"architectures is {names!r}; it must be a list of one name, {known[0]}: the "
                "engine finds the drafter's code by it.",
            )
    if raw.get("model_type") != "qwen3":
        yield from _for(
            BOTH,
            "model_type",
            f"model_type is {raw.get('model_type')!r}; it must be 'qwen3', whose config class both "
            "engines read.",
        )
    if not _is(raw.get("dflash_config")):
        yield from _for(
            BOTH, "dflash_config", "There is no dflash_config with mask_token_id and taps."
        )
    if not isinstance(raw.get("num_target_layers"), int):
        yield RuleFinding(
            "sglang",
            "num_target_layers",
            "num_target_layers is missing; SGLang would take the drafter's own number of layers "
            "and refuse taps beyond it.",
        )
    if raw.get("rope_theta") is None:
        yield RuleFinding(
            "sglang",
            "rope_theta",
            "rope_theta is not at the top level, where SGLang reads it; rope_parameters alone is "
            "not enough.",
        )


def _speculators_rules(raw: Mapping[str, Any]) -> Iterator[RuleFinding]:
    def fail(rule: str, reason: str) -> RuleFinding:
        return RuleFinding("vllm", rule, reason)

    kind = raw.get("speculators_model_type")
    if kind not in ("dflash", "dflash2"):
        yield fail("speculators_model_type", f"speculators_model_type is {kind!r}, not 'dflash'.")
    if not _is(raw.get("transformer_layer_config")):
        yield fail("transformer_layer_config", "There is no transformer_layer_config.")
        return
    if raw.get("sample_from_anchor"):
        yield fail(
            "sample_from_anchor", "sample_from_anchor is true, which vLLM refuses for dflash."
        )
    settings = raw.get("speculators_config")
    methods = settings.get("proposal_methods") if _is(settings) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if _is(first) else None
    block = raw.get("block_size")
    if not isinstance(count, int) or (isinstance(block, int) and count != block - 1):
        yield fail(
            "proposal_methods",
            f"proposal_methods[0].speculative_tokens is {count!r}; it must be block_size less its "
            f"anchor, and block_size is {block!r}.",
        )
    verifier = settings.get("verifier") if _is(settings) else None
    if not _is(verifier) or not verifier.get("name_or_path"):
        yield fail("verifier", "speculators_config.verifier names no target (name_or_path).")
    kinds = set(raw["transformer_layer_config"].get("layer_types") or [])
    if _SLIDING in kinds and "sliding_window_non_causal" not in raw:
        yield fail(
            "sliding_window_non_causal",
            "The drafter has sliding layers and does not say whether they are causal; speculators "
            "means causal by that, vLLM reads not causal.",
        )
    elif kinds == {_SLIDING, _FULL} and not raw["sliding_window_non_causal"]:
        yield fail(
            "sliding_window_non_causal",
            "Causal sliding layers stand beside full ones; vLLM would make all of them causal. Use "
            "z-lab's layout.",
        )


def _shared_rules(config: Mapping[str, Any], engines: tuple[str, ...]) -> Iterator[RuleFinding]:
    for key in _DECODER_KEYS:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            yield from _for(engines, key, f"{key} is {value!r}; it must be a number above 0.")
    if config.get("hidden_act", "silu") != "silu":
        yield from _for(
            engines,
            "hidden_act",
            f"hidden_act is {config['hidden_act']!r}; both engines know drafters with silu only.",
        )
    block = config.get("block_size")
    if not _is_integer(block) or block < 2:
        yield from _for(
            engines,
            "block_size",
            f"block_size is {block!r}; it must be at least 2. vLLM is told block_size less 1 draft "
            "tokens, SGLang would guess 16.",
        )
    mask, vocabulary = config.get("mask_token_id"), config.get("vocab_size")
    if not _is_integer(mask) or (_is_integer(vocabulary) and not 0 <= mask < vocabulary):
        yield from _for(
            engines,
            "mask_token_id",
            f"mask_token_id is {mask!r}; it must be a token of the vocabulary of {vocabulary!r}. "
            "vLLM needs it, SGLang would look for a token of its own.",
        )
    yield from _tap_rules(config, engines)
    yield from _layer_rules(config, engines)


def _tap_rules(config: Mapping[str, Any], engines: tuple[str, ...]) -> Iterator[RuleFinding]:
    taps, count = config.get("target_layer_ids"), config.get("num_target_layers")
    if not _are_integers(taps) or not taps:
        reason = f"target_layer_ids is {taps!r}; it must list the target's layers, from 0."
        yield from _for(engines, "target_layer_ids", reason)
    elif min(taps) < 0 or (_is_integer(count) and max(taps) >= count):
        reason = f"target_layer_ids is {taps}; the target has layers 0 to {(count or 1) - 1}."
        yield from _for(engines, "target_layer_ids", reason)


def _layer_rules(config: Mapping[str, Any], engines: tuple[str, ...]) -> Iterator[RuleFinding]:
    kinds, count = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != count):
        yield from _for(
            engines, "layer_types", f"layer_types does not have one entry for each of {count}."
        )
        return
    if set(kinds or []) - {_SLIDING, _FULL}:
        yield from _for(engines, "layer_types", f"layer_types has others than {_SLIDING}, {_FULL}.")
    if _SLIDING in (kinds or []) and not _is_integer(config.get("sliding_window")):
        yield from _for(
            engines, "sliding_window", "There are sliding layers and no sliding_window for them."
        )
    queries, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if _is_integer(queries) and _is_integer(keys) and keys > 0 and queries % keys:
        yield from _for(
            engines,
            "num_key_value_heads",
            f"num_attention_heads is {queries}, no multiple of num_key_value_heads, {keys}.",
        )


def _fit_rules(
    config: Mapping[str, Any], target: ModelConfig | None, engines: tuple[str, ...]
) -> Iterator[RuleFinding]:
    if target is None:
        return
    for key, theirs in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", len(target.layers)),
    ):
        if config.get(key) is not None and config[key] != theirs:
            yield from _for(engines, key, f"{key} is {config[key]!r}; the target's is {theirs}.")
    taps = config.get("target_layer_ids")
    if _are_integers(taps) and taps and max(taps) >= len(target.layers):
        yield from _for(
            engines,
            "target_layer_ids",
            f"target_layer_ids is {taps}; the target has layers 0 to {len(target.layers) - 1}.",
        )


def _limits(
    raw: Mapping[str, Any], config: Mapping[str, Any], engines: tuple[str, ...]
) -> Iterator[RuleFinding]:
    if {_SLIDING, _FULL} <= set(config.get("layer_types") or []):
        yield RuleFinding(
            "vllm",
            "runner",
            "Sliding and full layers are mixed: vLLM serves that with its V2 runner only, so not "
            "on a CPU.",
        )
    if "DFlash2DraftModel" in (raw.get("architectures") or []):
        yield RuleFinding("vllm", "runner", "DFlash 2 needs vLLM's V2 runner, so not on a CPU.")
    for key, what in (
        ("input_embedding_scale", "scale the drafter's embeddings"),
        ("final_logit_softcapping", "cap the drafter's logits, nor scale a Gemma 4 embedding"),
    ):
        if config.get(key) not in (None, 1.0):
            yield RuleFinding(
                "vllm",
                key,
                f"Stock vLLM does not {what}; flashdraft's plugin does, once installed beside it.",
            )
    if config.get("quantization_config"):
        yield from _for(
            engines,
            "quantization_config",
            "A quantised drafter: SGLang has served such with an accepted length of 1.00, without "
            "a word. Measure it.",
        )
    if config.get("auto_map"):
        yield from _for(
            engines, "auto_map", "auto_map asks for remote code; neither engine needs it. Drop it."
        )


def _for(engines: tuple[str, ...], rule: str, reason: str) -> Iterator[RuleFinding]:
    for engine in engines:
        yield RuleFinding(engine, rule, reason)


def _is(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_integers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(map(_is_integer, value))
