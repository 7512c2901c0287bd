"""What files of weights can be read, and as what they are kept on a GPU: one table.

`flashdraft models` prints it, and docs/models.md has it between marks
(`python -m benchmarks.readable_formats` writes it there). No torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Readable(NamedTuple):
    """A row: formats that are kept alike."""

    names: str
    kept: str
    bits: str  # of a value on a GPU, scales included
    note: str = ""


READABLE = (
    Readable("safetensors in floats", "as `dtype` says", "16", "few bits by `--quantize`"),
    Readable("GGUF F32, F16, BF16", "as `dtype` says", "16", "few bits by `--quantize`"),
    Readable("GGUF Q4_0, Q4_1, Q4_K", "4 bits, their own scales and minimums", "4.5, 5, 4.6"),
    Readable(
        "GGUF Q3_K", "4 bits, scales of 16 values under scales of 256", "4.6", "3.4 in a file"
    ),
    Readable("GGUF Q2_K", "4 bits, scales and minimums likewise", "5.1", "2.6 in a file"),
    Readable("GGUF Q6_K", "6 bits, scales of 16 values under scales of 256", "6.6"),
    Readable("GGUF Q8_0, Q5_0, Q5_1, Q5_K", "8 bits", "8.5 and more"),
    Readable(
        "GGUF IQ4_NL, IQ4_XS", "8 bits: their levels as integers", "8.5, 8.3", "4.5, 4.3 in a file"
    ),
    Readable("compressed-tensors int4", "4 bits", "4.1 to 5", "groups of 16 to 128, or rows"),
    Readable("compressed-tensors int8, fp8; plain fp8", "8 bits", "8"),
    Readable(
        "GPTQ of 4 bits, AWQ",
        "4 bits; zero points as minimums in float32",
        "4.1 to 5.5",
        "groups of 32 to 128, or rows",
    ),
    Readable("GPTQ of 8 bits", "8 bits; zero points likewise", "8.1 to 9.5", "the same groups"),
    Readable("GPTQ with desc_act", "floats, with a warning", "16", "no kernel follows its order"),
    Readable(
        "NVFP4 (ModelOpt, compressed-tensors)", "8 bits: values doubled", "10", "4.5 in a file"
    ),
    Readable("ModelOpt fp8", "8 bits", "8", "one scale a tensor"),
)
# of the many that are not read, those that people come with
REFUSED = ("bitsandbytes", "MXFP4", "IQ3_S", "IQ2_XS", "TQ1_0")
