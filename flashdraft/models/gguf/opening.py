"""A GGUF model's configs in the Hub's form, with the file that it sees with, if there is one.

Of models in GGUF only Gemma 4 sees. Its tower is in a file of its own (tower.py), which is named,
or found beside the model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.errors import CheckpointError, FlashdraftError, RequestError, UnsupportedModelError
from flashdraft.models.config.vision import NO_TOWER
from flashdraft.models.files.mmproj import beside, one_of_each
from flashdraft.models.files.opening import reading
from flashdraft.models.gguf.config import MEDIA_TOKENS, gguf_config, gguf_generation_config
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.tower import tower_config

_MARKS = ("boi_token_id", "image_token_id", "eoi_token_id")


class GGUFModel(NamedTuple):
    """What a model's files say."""

    raw_config: dict[str, Any]
    generation_config: dict[str, Any]
    tower: GGUFFile | None  # that it sees with
    why_none: str | None  # in sentences, where there is no tower


class _Tower(NamedTuple):
    file: GGUFFile
    raw_config: dict[str, Any]  # of the model with this tower


def read_gguf(file: GGUFFile, vision: bool = False, mmproj: Path | None = None) -> GGUFModel:
    """The model of a file; with `vision` it has a tower: `mmproj`, or the one beside the file.

    A tower that is named must fit. One that only lies there is left alone where it does not.
    """
    raw_config, generation_config = gguf_config(file), gguf_generation_config(file)
    tower, why_none = None, NO_TOWER
    if vision and mmproj is not None:
        tower = _open_tower(mmproj, file, raw_config)
    elif vision and _may_see(raw_config):
        tower, why_none = _find_tower(file, raw_config)
    if tower is None:
        return GGUFModel(raw_config, generation_config, None, why_none)
    return GGUFModel(tower.raw_config, generation_config, tower.file, None)


def _may_see(raw_config: dict[str, Any]) -> bool:
    return raw_config["model_type"] == "gemma4_text"


def _find_tower(model: GGUFFile, raw_config: dict[str, Any]) -> tuple[_Tower | None, str]:
    """The tower that fits, of those in the model's folder; else why there is none."""
    folder, fitting, problems = model.path.parent, {}, []
    for name in beside(model.path.name, [path.name for path in folder.glob("*.gguf")]):
        try:
            fitting[name] = _open_tower(folder / name, model, raw_config)
        except FlashdraftError as error:
            problems.append(str(error))
    found = one_of_each(fitting)
    if len(found) > 1:
        raise RequestError(
            f"{len(found)} mmproj files beside {model.path} fit it: {', '.join(found)}. Name the "
            "one that it sees with by --mmproj, or leave pictures out by --no-vision (in Python: "
            "mmproj=…, vision=False)."
        )
    return (fitting[found[0]] if found else None), " ".join(problems) or NO_TOWER


def _open_tower(path: Path, model: GGUFFile, raw_config: dict[str, Any]) -> _Tower:
    """A tower's file, if it is one for this model."""
    if not _may_see(raw_config):
        raise UnsupportedModelError(
            f"{model.path} is a {raw_config['model_type']} model; of GGUF models only Gemma 4 sees "
            "pictures. Leave the mmproj file out."
        )
    with reading(path):
        file = GGUFFile(path)
        tower = tower_config(file, raw_config["hidden_size"])
    missing = [key for key in _MARKS if key not in raw_config]
    if missing:
        raise CheckpointError(
            f"The vocabulary of {model.path} lacks the tokens that stand for pictures "
            f"({', '.join(missing)}). Use another file of the model."
        )
    media = {key: raw_config[key] for key in MEDIA_TOKENS if key in raw_config}
    text = {key: value for key, value in raw_config.items() if key not in media}
    # no file says whether sliding layers see a picture whole: those of the small models do not
    seen = None if raw_config["hidden_size_per_layer_input"] else "vision"
    whole = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {**text, "use_bidirectional_attention": seen},
        "vision_config": tower,
        **media,
    }
    return _Tower(file, whole)
