"""What can be read: families, formats of weights, adapters. The one table of it.

`flashdraft models` prints it, docs/models.md has it between marks
(`python -m benchmarks.readable_tables` writes it there), and what is refused by its own name is
refused in its words. The drafters known for a family's models are sources.py's. No torch.
"""

from __future__ import annotations

from typing import NamedTuple

_TEXT = "_text"  # behind the model_type of a text model that has none of a larger one's towers


class FamilyRow(NamedTuple):
    """Models that differ in sizes alone."""

    names: str
    model_types: tuple[str, ...]  # of a config.json
    gguf: str | None  # `general.architecture`; None: its files are not read
    unread: str = ""  # parts of these models that are left out
    note: str = ""

    @property
    def shown_types(self) -> str:
        """The model types; of a model and its text alone the model's."""
        shorter = (f"{one}{_TEXT}" for one in self.model_types)
        return ", ".join(sorted(set(self.model_types).difference(shorter)))


class FormatRow(NamedTuple):
    """Formats of weights that are kept alike."""

    names: str
    kept: str
    bits: str  # of a value on a GPU, scales included
    note: str = ""


class AdapterRow(NamedTuple):
    """What of an adapter's folder is merged alike."""

    names: str
    merged: str


FAMILIES = (
    FamilyRow("Llama, SmolLM2", ("llama",), "llama", note="RoPE scaled by llama3, linear, yarn"),
    FamilyRow("Mistral", ("mistral",), "llama", note="one sliding window for all layers, or none"),
    FamilyRow("Qwen2, 2.5", ("qwen2",), "qwen2"),
    FamilyRow(
        "Qwen3",
        ("qwen3",),
        "qwen3",
        note="longer contexts by yarn: `rope_scaling` in config.json",
    ),
    FamilyRow(
        "Qwen3 with experts",
        ("qwen3_moe",),
        "qwen3moe",
        note="experts in every layer, shares that add up to one",
    ),
    FamilyRow("Gemma 3", ("gemma3", "gemma3_text"), "gemma3", "pictures"),
    FamilyRow(
        "Gemma 4 31B, 26B-A4B",
        ("gemma4", "gemma4_text"),
        "gemma4",
        note="[pictures](python.md#pictures)",
    ),
    FamilyRow(
        "Gemma 4 E2B, E4B",
        ("gemma4", "gemma4_text"),
        "gemma4",
        "sound",
        note="[pictures](python.md#pictures)",
    ),
    FamilyRow("Gemma 4 12B", ("gemma4_unified", "gemma4_unified_text"), None, "pictures, sound"),
)
# by their model_type, with the reason
REFUSED_FAMILIES = {
    "gpt_oss": "a learnt logit stands beside every row's keys (sinks), and its experts have "
    "biases, a clamped gate and weights in MXFP4, none of which the kernels here do. vLLM and "
    "SGLang run it (`flashdraft serve --engine`)",
}
FORMATS = (
    FormatRow("safetensors in floats", "as `dtype` says", "16", "few bits by `--quantize`"),
    FormatRow("GGUF F32, F16, BF16", "as `dtype` says", "16", "few bits by `--quantize`"),
    FormatRow("GGUF Q4_0, Q4_1, Q4_K", "4 bits, their own scales and minimums", "4.5, 5, 4.6"),
    FormatRow("GGUF Q3_K", "4 bits, scales of 16 under scales of 256", "4.6", "3.4 in a file"),
    FormatRow("GGUF Q2_K", "4 bits, scales and minimums likewise", "5.1", "2.6 in a file"),
    FormatRow("GGUF Q6_K", "6 bits, scales of 16 under scales of 256", "6.6"),
    FormatRow("GGUF Q8_0, Q5_0, Q5_1, Q5_K", "8 bits", "8.5 and more"),
    FormatRow(
        "GGUF IQ4_NL, IQ4_XS", "8 bits: their levels as integers", "8.5, 8.3", "4.5, 4.3 in a file"
    ),
    FormatRow("compressed-tensors int4", "4 bits", "4.1 to 5", "groups of 16 to 128, or rows"),
    FormatRow("compressed-tensors int8, fp8; plain fp8", "8 bits", "8"),
    FormatRow(
        "GPTQ of 4 bits, AWQ",
        "4 bits; zero points as minimums in float32",
        "4.1 to 5.5",
        "groups of 32 to 128, or rows",
    ),
    FormatRow("GPTQ of 8 bits", "8 bits; zero points likewise", "8.1 to 9.5", "the same groups"),
    FormatRow("GPTQ with desc_act", "floats, with a warning", "16", "no kernel follows its order"),
    FormatRow(
        "NVFP4 (ModelOpt, compressed-tensors)", "8 bits: values doubled", "10", "4.5 in a file"
    ),
    FormatRow("ModelOpt fp8", "8 bits", "8", "one scale a tensor"),
)
# of the many that are not read, those that people come with
REFUSED_FORMATS = ("bitsandbytes", "MXFP4", "IQ3_S", "IQ2_XS", "TQ1_0")
ADAPTERS = (
    AdapterRow("LoRA and rsLoRA of linears", "in float32 as weights are read, rounded once"),
    AdapterRow("LoRA of the embedding", "likewise, unless it also chooses tokens (tied)"),
    AdapterRow("biases that a LoRA adds (`lora_bias`)", "likewise"),
    AdapterRow("ranks and alphas of their own", "by plain names, not by regular expressions"),
    AdapterRow("whole modules (`modules_to_save`), trained biases", "in place of the model's own"),
)
REFUSED_ADAPTERS = ("DoRA", "QALoRA", "PiSSA", "OLoRA", "LoftQ", "IA3")
