"""The flags that commands share, and what they mean: a model, how it samples, where JSON goes.

No torch: what is typed wrongly is answered at once. A model's defaults are those of `LLM`, which a
test compares; the sampling's are those of `SamplingParams` (or the model's own, in a chat). Only
flags that were given override them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flashdraft.chat.sampling import sampling_defaults
from flashdraft.cli.parser import OneOf, device
from flashdraft.core import SamplingParams
from flashdraft.engine.config import DEFAULT_CACHE, KV_DTYPES, KV_KEYS, OFF, CacheOptions
from flashdraft.errors import RequestError
from flashdraft.kernels.kinds import ACTIVATIONS, AS_STORED, DTYPES, QUANTIZE, WeightOptions
from flashdraft.media.sizes import BUDGETS
from flashdraft.models.config.recommended import SAMPLING_KEYS
from flashdraft.models.sources import DEFAULT_MODEL, require_mmproj

KEY_VARIABLE = "FLASHDRAFT_API_KEY"  # a flag shows in the list of processes; this does not
GREEDY, RECOMMENDED = "greedy", "recommended"  # how bench samples
NATIVE = "native"  # the engine that is our own
_ACTIVATIONS_HELP = (
    f"what rows become before the target's linears, {' or '.join(ACTIVATIONS)} as --quantize: "
    "faster for many rows, at some cost in quality"
)
MODEL_DEFAULTS: Mapping[str, Any] = {
    "model": DEFAULT_MODEL,
    **dict.fromkeys(("draft", "verify", "device", "dtype"), "auto"),
    **AS_STORED._asdict(),
    **dict.fromkeys(("tree", "max_context", "lora")),
    **{"no_vision": False, "mmproj": None},
    **dataclasses.asdict(DEFAULT_CACHE),
}


class Flag(NamedTuple):
    """A flag that takes one value."""

    type: Callable[[str], Any]
    metavar: str
    help: str


SAMPLING_FLAGS = {
    "max_tokens": Flag(int, "N", "longest answer, in tokens"),
    "temperature": Flag(float, "X", "0 is greedy"),
    "top_p": Flag(float, "X", "sample from the most likely tokens that make up this share"),
    "top_k": Flag(int, "N", "sample from the N most likely tokens; 0 is off"),
    "min_p": Flag(float, "X", "drop tokens below this share of the most likely one"),
    "repetition_penalty": Flag(float, "X", "divide the scores of tokens seen before; 1 is off"),
    "presence_penalty": Flag(float, "X", "subtract from the scores of tokens in the answer"),
    "frequency_penalty": Flag(float, "X", "the same, for every time they occur"),
    "seed": Flag(int, "N", "makes sampling repeatable; a fresh one each time if not given"),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--model and how to run it."""
    group = parser.add_argument_group("model")

    def add(name: str, type_: Callable[[str], Any], metavar: str, text: str) -> None:
        default = MODEL_DEFAULTS[name]
        shown = "" if default is None else " (default: %(default)s)"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=type_, default=default, metavar=metavar, help=text + shown)

    add("model", str, "NAME", "a known name, a Hub id, a folder or a GGUF file")
    add(
        "draft",
        str,
        "DRAFTER",
        "auto, none (plain decoding), ngram (lookup only), or a drafter's folder or Hub id",
    )
    add("verify", _verify_length, "N", "draft tokens to check per step, or auto")
    add_tree_argument(group)
    add("device", device, "DEVICE", "auto, cpu or cuda")
    add("dtype", OneOf("--dtype", DTYPES), "DTYPE", f"one of {', '.join(DTYPES)}")
    schemes = f"one of {', '.join(QUANTIZE)}; on a GPU"
    weights, head = (OneOf(flag, QUANTIZE) for flag in ("--quantize", "--quantize-head"))
    add("quantize", weights, "SCHEME", f"what float weights become as they are loaded, {schemes}")
    add("quantize_head", head, "SCHEME", f"the same for the head, {schemes}")
    add("activations", OneOf("--activations", ACTIVATIONS), "SCHEME", _ACTIVATIONS_HELP)
    add("lora", str, "FOLDER", "a LoRA adapter's folder, merged into the model as it is loaded")
    add("max_context", int, "N", "longest prompt plus answer, in tokens")
    add("cache_gb", float, "GB", "memory for keys and values")
    add_cache_arguments(group)
    add_vision_arguments(group)


def add_tree_argument(parser: argparse._ActionsContainer) -> None:
    """--tree."""
    parser.add_argument(
        "--tree",
        type=_tree,
        default=MODEL_DEFAULTS["tree"],
        metavar="N",
        help="draft tokens to check per step where several may follow the same one: N of them, "
        "fewer where many requests share a step, auto for as many as pay, or off (default)",
    )


def add_vision_arguments(parser: argparse._ActionsContainer) -> None:
    """--no-vision and --mmproj."""
    parser.add_argument(
        "--no-vision",
        action="store_true",
        help="leave out the part that sees pictures, and have its memory for other things",
    )
    parser.add_argument(
        "--mmproj",
        metavar="FILE",
        help="what a GGUF model sees with (default: the mmproj file beside it)",
    )


def check_mmproj(arguments: argparse.Namespace) -> None:
    """Refuse a --mmproj that is none, before anything is loaded; --no-vision leaves it out."""
    if arguments.mmproj is not None and not arguments.no_vision:
        require_mmproj(arguments.mmproj)


def add_picture_arguments(parser: argparse.ArgumentParser, when: str) -> None:
    """--image, --pdf, --video and --image-tokens."""
    group = parser.add_argument_group("pictures")
    group.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a picture that goes before {when}; may be given several times",
    )
    group.add_argument(
        "--pdf",
        action="append",
        default=[],
        metavar="FILE",
        help="a PDF document whose pages go there, too, as pictures",
    )
    group.add_argument(
        "--video",
        action="append",
        default=[],
        metavar="FILE",
        help="a film of which some frames go there, too; without its sound",
    )
    group.add_argument(
        "--image-tokens",
        type=OneOf("--image-tokens", tuple(map(str, BUDGETS))),
        metavar="N",
        help=f"the most tokens of a picture or page, one of {', '.join(map(str, BUDGETS))}: more "
        "see finer detail (default: the model's own; of a page 560)",
    )


def add_model_name(parser: argparse.ArgumentParser) -> None:
    """The model as the first word of a command that has --model too."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="MODEL",
        help=f"a known name, a Hub id, a folder or a GGUF file (default: {DEFAULT_MODEL})",
    )


def take_model_name(arguments: argparse.Namespace) -> str:
    """The model that is named, by the first word or by --model; from here on in `model`."""
    if arguments.name is not None:
        if arguments.model not in (DEFAULT_MODEL, arguments.name):
            raise RequestError(f"Two models are named, {arguments.name!r} and {arguments.model!r}.")
        arguments.model = arguments.name
    return str(arguments.model)


def add_cache_arguments(parser: argparse._ActionsContainer) -> None:
    """--kv-dtype and --kv-keys."""
    keys = "keys that can be made of values (Gemma 4's full layers)"
    for name, metavar, what, known in (
        ("kv_dtype", "DTYPE", "of keys and values", KV_DTYPES),
        ("kv_keys", "WAY", keys, KV_KEYS),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag,
            type=OneOf(flag, known),
            default=getattr(CacheOptions, name),
            metavar=metavar,
            help=f"{what}, one of {', '.join(known)} (default: %(default)s)",
        )


def weight_options(arguments: argparse.Namespace) -> WeightOptions:
    """What --quantize, --quantize-head and --activations say."""
    return WeightOptions(arguments.quantize, arguments.quantize_head, arguments.activations)


def cache_options(arguments: argparse.Namespace) -> CacheOptions:
    """What --kv-dtype, --kv-keys and, where a command has it, --cache-gb say."""
    size = getattr(arguments, "cache_gb", None)
    return CacheOptions(size, arguments.kv_dtype, arguments.kv_keys)


def add_quantize_arguments(parser: argparse.ArgumentParser) -> None:
    """--quantize, --quantize-head and --activations, where a target is loaded and not served."""
    schemes = f"one of {', '.join(QUANTIZE)}; on a GPU"
    for flag, what in (("--quantize", "float weights"), ("--quantize-head", "head and its table")):
        text = f"what the target's {what} become on loading, {schemes}"
        parser.add_argument(flag, type=OneOf(flag, QUANTIZE), metavar="SCHEME", help=text)
    add_activations_argument(parser)


def add_activations_argument(parser: argparse.ArgumentParser) -> None:
    """--activations."""
    known = OneOf("--activations", ACTIVATIONS)
    parser.add_argument("--activations", type=known, metavar="SCHEME", help=_ACTIVATIONS_HELP)


def add_device_arguments(parser: argparse.ArgumentParser, dtype_help: str | None = None) -> None:
    """--device and --dtype, for the same commands."""
    shown = " (default: %(default)s)"
    parser.add_argument(
        "--device", type=device, default="auto", metavar="DEVICE", help="auto, cpu or cuda" + shown
    )
    parser.add_argument(
        "--dtype",
        type=OneOf("--dtype", DTYPES),
        default="auto",
        metavar="DTYPE",
        help=dtype_help or f"one of {', '.join(DTYPES)}" + shown,
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How the answer is chosen; the model's own settings are the default."""
    group = parser.add_argument_group("sampling")
    for name, flag in SAMPLING_FLAGS.items():
        default = getattr(SamplingParams, name)
        shown = "" if default is None else f" (default: {default})"
        if name in SAMPLING_KEYS:
            shown = " (default: the model's own)"
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=flag.type,
            default=argparse.SUPPRESS,
            metavar=flag.metavar,
            help=flag.help + shown,
        )
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on after the model's end of text",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """--json [PATH]: "-" stands for stdout."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="PATH",
        help="print one JSON object, or write it to PATH",
    )


def sampling_params(
    arguments: argparse.Namespace, base: SamplingParams | None = None
) -> SamplingParams:
    """`base`, by default greedy, with the flags that were given."""
    names = (*SAMPLING_FLAGS, "stop", "ignore_eos")
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return dataclasses.replace(base or SamplingParams(), **given)


def model_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """How the model's makers would sample it; greedy where they say nothing."""
    defaults = sampling_defaults(generation_config)
    if not generation_config.get("do_sample") and "temperature" not in defaults:
        return SamplingParams()
    return SamplingParams(**{"temperature": 1.0, **defaults})


class _Tree(OneOf):
    def __call__(self, text: str) -> Any:
        return int(text) if text.isascii() and text.isdigit() else super().__call__(text)


_tree = _Tree("--tree", ("auto", OFF), "a number")


def _verify_length(text: str) -> str | int:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a number") from None
