"""Has llama.cpp quantise a tiny model, dequantise it and answer, for test_llama_cpp.py.

It needs an environment of its own, which compiles llama.cpp (half an hour on one core):

    python3 -m venv tools
    tools/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
    PYTHONPATH=. tools/bin/python tests/unit/models/gguf/make_llama_cpp.py

llama_cpp_*.gguf are its files, of which each has several formats, as llama.cpp mixes them; where
256 does not divide a row it takes others. llama_cpp.json has the sha256 of the float32 that its own
functions make of every tensor, and its greedy answer over the model in float32.
"""

import ctypes
import hashlib
import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from tests.unit.models.gguf.factory import write_wide_qwen3

FOLDER = Path(__file__).parent
FILES = {"Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "IQ4_XS": 30}  # by llama.cpp's file type
PROMPTS, LENGTH = ((5, 9, 17, 3, 28, 11), (30, 7, 7, 19), (1, 2, 14, 22, 8, 16, 27)), 24
BASE = ctypes.CDLL(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so")


def dequantised(tensor):
    """What llama.cpp makes of a tensor in few bits; None of one in floats."""
    kind = tensor.tensor_type.name
    if kind == "F32":
        return None
    values = np.zeros(tensor.n_elements, dtype=np.float32)
    head, _, tail = kind.partition("_")
    name = f"{head.lower()}_{tail.lower() if head == 'IQ4' else tail}"
    data = np.ascontiguousarray(tensor.data)
    BASE[f"dequantize_row_{name}"](
        data.ctypes.data_as(ctypes.c_void_p),
        values.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(values.size),
    )
    return {"format": kind, "sha256": hashlib.sha256(values.tobytes()).hexdigest()}


def answer(path, prompt):
    """The greedy tokens of a model in float32, with its keys and values in float32 too."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=64,
        n_threads=1,
        type_k=0,
        type_v=0,
        flash_attn=False,
        logits_all=True,
        verbose=False,
    )
    tokens = list(prompt)
    model.eval(tokens)
    while len(tokens) < len(prompt) + LENGTH:
        tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(tokens[-1:])
    return tokens[len(prompt) :]


def main():
    told = {"llama-cpp-python": llama_cpp.__version__, "files": {}}
    with tempfile.TemporaryDirectory() as place:
        whole = write_wide_qwen3(Path(place) / "whole.gguf")
        told["answers"] = [{"prompt": one, "tokens": answer(whole, one)} for one in PROMPTS]
        for kind, file_type in FILES.items():
            path = FOLDER / f"llama_cpp_{kind}.gguf"
            settings = llama_cpp.llama_model_quantize_default_params()
            settings.ftype, settings.nthread = file_type, 1
            names = str(whole).encode(), str(path).encode()
            assert llama_cpp.llama_model_quantize(*names, ctypes.byref(settings)) == 0
            tensors = {one.name: dequantised(one) for one in gguf.GGUFReader(path).tensors}
            told["files"][kind] = {name: one for name, one in tensors.items() if one}
    (FOLDER / "llama_cpp.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
