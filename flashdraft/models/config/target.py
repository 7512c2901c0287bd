"""What a target model is, read from a Hugging Face config.json. Frozen; unknown features raise.

Every key that changes the forward pass is named once, here, in common.py or in its family's module
(llama.py, gemma.py); the others are in keys.py with the reason why they change nothing, or are
refused. GGUF metadata is first turned into the same JSON form (loading.py), so this is the only
reader. Where a key is missing, transformers' default holds.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.kernels.kinds import Activation
from flashdraft.models.config import gemma, llama
from flashdraft.models.config.common import read_common
from flashdraft.models.config.keys import GENERATION, GENERATION_OFF, OTHER_MODALITIES, irrelevant
from flashdraft.models.config.layers import ExpertsConfig, LayerConfig, PerLayerConfig
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.values import ConfigObject, require, token_ids
from flashdraft.models.config.vision import NO_TOWER, VisionConfig, read_vision
from flashdraft.models.readable import REFUSED_FAMILIES

logger = logging.getLogger(__name__)

Json = Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """A target model. `family` picks the module that builds it."""

    family: str  # "llama" or "gemma"
    architecture: str  # as named by the checkpoint, for messages
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    activation: Activation
    tie_embeddings: bool
    max_position: int
    attention_scale: float | None = None  # None = head_dim ** -0.5
    qk_norm: bool = False
    v_norm: bool = False  # without a weight
    norm_offset: float = 0.0  # norms multiply by their weight plus this
    layer_scalars: bool = False  # on the stream behind every layer
    qkv_bias: bool = False
    output_bias: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    per_layer: PerLayerConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    forbidden_token_ids: tuple[int, ...] = ()  # never in an answer: placeholders of media
    vision: VisionConfig | None = None  # None: it takes no pictures, for the reason that follows
    why_no_vision: str | None = NO_TOWER  # in sentences; None where there is a tower
    sees_pictures_whole: bool = False  # sliding layers: a picture's rows see all of it

    @property
    def intermediate_size(self) -> int:
        """Of the widest dense MLP; 0: there are experts alone."""
        return max(layer.intermediate_size for layer in self.layers)

    @property
    def cached_layers(self) -> tuple[LayerConfig, ...]:
        """Those that keep keys and values of their own."""
        return tuple(layer for layer in self.layers if layer.kv_source is None)

    @property
    def cache_places(self) -> tuple[int, ...]:
        """For every layer, which of the `cached_layers` keeps what it reads."""
        sources = [
            index if layer.kv_source is None else layer.kv_source
            for index, layer in enumerate(self.layers)
        ]
        places = {source: place for place, source in enumerate(sorted(set(sources)))}
        return tuple(places[source] for source in sources)

    @classmethod
    def from_hf(cls, config: Json) -> ModelConfig:
        """Read a config.json of a supported family; of multimodal ones the text and the pictures.

        Where the tower for pictures is none that can be run, the text is read without it.
        """
        whole = ConfigObject(config)
        architecture = (whole.words("architectures") or ["(none)"])[0]
        section = whole.section("text_config")
        text = section if section is not None and section.names() else whole
        outer_type = whole.raw("model_type")
        model_type = text.raw("model_type") or outer_type
        reader = READERS.get(model_type) if isinstance(model_type, str) else None
        if reader is None:
            why = REFUSED_FAMILIES.get(model_type) if isinstance(model_type, str) else None
            raise UnsupportedModelError(
                f"The model type {quoted(model_type)} ({quoted(architecture)}) is not supported"
                f"{f': {why}' if why else ''}; supported types are {', '.join(sorted(READERS))}."
            )
        read_quantization(config)  # refuses what cannot be read
        if reader.defaults:
            is_whole = text is whole
            text = text.with_defaults(reader.defaults)
            whole = text if is_whole else whole
        common = read_common(whole, text, architecture, model_type)
        model = cls(architecture=architecture, **reader.read(text, common))
        vision = read_vision(whole, architecture, model.vocab_size)
        model = dataclasses.replace(model, vision=vision.config, why_no_vision=vision.why_none)
        tables = (reader.irrelevant, OTHER_MODALITIES)
        if text is not whole:
            whole.forget(text)  # what both say is the text model's
            whole.finish(architecture, irrelevant(*tables, multimodal=True), "config.json")
        text.finish(architecture, irrelevant(*tables), "config.json")
        _check(model)
        return model

    def without_vision(self, reason: str) -> ModelConfig:
        """The same model for text alone."""
        return dataclasses.replace(self, vision=None, why_no_vision=reason)

    def with_generation(self, generation: Json) -> ModelConfig:
        """What a generation_config.json adds: further stop tokens, and tokens never to be said.

        It may name more stop tokens than config.json (Gemma 4: 3 instead of 2). Ways to decode that
        are not done here are left out with a warning.
        """
        settings = ConfigObject(generation)
        stops = token_ids(settings.raw("eos_token_id"), "eos_token_id", self.vocab_size)
        banned = token_ids(settings.raw("suppress_tokens"), "suppress_tokens", self.vocab_size)
        every = tuple(dict.fromkeys((*self.eos_token_ids, *stops)))
        wanted = {
            key: value
            for key, off in GENERATION_OFF.items()
            if (value := settings.raw(key)) not in (None, off)
        }
        # advice on how to decode, not what the model is: it is left out aloud
        for key, value in {**wanted, **settings.left_over(irrelevant(GENERATION))}.items():
            logger.warning(
                "The generation_config.json of %s asks for %s = %s, which flashdraft does not do; "
                "it is left out.",
                self.architecture,
                quoted(key),
                quoted(value),
            )
        forbidden = set(self.forbidden_token_ids) | set(banned)
        return dataclasses.replace(
            self, eos_token_ids=every, forbidden_token_ids=tuple(sorted(forbidden - set(every)))
        )


def _check(model: ModelConfig) -> None:
    """Refuse sizes that would fail, or give NaN, only once the model runs."""
    if model.experts is not None:
        count, chosen = model.experts.num_experts, model.experts.num_chosen
        require(1 <= chosen <= count, "top_k_experts", chosen, f"1 to {count}, the experts")
    for layer in dict.fromkeys(model.layers):
        dim, kv_heads = layer.head_dim, layer.num_kv_heads
        require(dim >= 2 and dim % 2 == 0, "head_dim", dim, "even and at least 2")
        heads, multiple = layer.num_heads, f"a multiple of the {kv_heads} key/value heads"
        require(heads % kv_heads == 0, "num_attention_heads", heads, multiple)


READERS = {**llama.READERS, **gemma.READERS}
