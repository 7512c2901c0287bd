"""SentencePiece tokenizers in GGUF files: what the `sentencepiece` package makes of the same texts.

sentencepiece.json has vocabularies that it was trained to here, and its ids, written once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.models.gguf.tokenizer import build_gguf_tokenizer
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.models.gguf.test_file import write_llama

MODELS = json.loads(Path(__file__).with_name("sentencepiece.json").read_text())["models"]


def metadata(name: str = "prefixed", **changes: Any) -> dict[str, Any]:
    said = {**MODELS[name]["metadata"], **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items() if value is not None}


def built(name: str = "prefixed", **changes: Any) -> tokenizers.Tokenizer:
    backend = build_gguf_tokenizer(metadata(name, **changes), Path("m.gguf"))
    assert backend is not None
    return backend


def with_piece(text: str, kind: int, score: float = 0.0) -> dict[str, Any]:
    """Changes that add a piece."""
    said = MODELS["prefixed"]["metadata"]
    return {
        "tokens": [*said["tokens"], text],
        "scores": [*said["scores"], score],
        "token_type": [*said["token_type"], kind],
    }


def listed(texts: list[str]) -> dict[str, Any]:
    """Changes that leave these pieces, the first of them unknown."""
    types = [2] + [1] * (len(texts) - 1)
    return {"tokens": texts, "scores": [0.0] * len(texts), "token_type": types}


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_the_package_s(name: str) -> None:
    backend = built(name)
    for text, ids in MODELS[name]["texts"].items():
        assert backend.encode(text, add_special_tokens=False).ids == ids, text
        if name != "without bytes":
            assert backend.decode(ids) == text.replace("▁", " ")


def test_a_file_s_tokenizer(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", general=metadata())
    tokenizer = Tokenizer.from_checkpoint(tmp_path / "m.gguf")
    assert tokenizer is not None
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.special_ids == {0, 1, 2}
    text = "a little text, 日本 🙂"
    ids = tokenizer.encode(text, add_special=True)
    assert ids[0] == 1 and tokenizer.decode(ids) == text
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([one]) for one in ids[1:]] + [decoder.flush()]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


def test_bos_and_the_space_before_a_text() -> None:
    assert built().encode("a").ids[0] == 1  # llama.cpp's default
    assert built(add_bos_token=False).encode("a").ids[0] != 1
    assert built(add_space_prefix=None).encode("a").tokens[1] == "▁a"
    assert built(add_space_prefix=False).encode("a").tokens[1] == "a"


def test_tokens_that_are_matched_whole() -> None:
    backend = built(**with_piece("<|user|>", 4))
    last = backend.get_vocab_size() - 1
    found = backend.encode("<s>a<|user|>b", add_special_tokens=False)
    assert found.ids[0] == 1 and last in found.ids
    assert backend.decode([last]) == "<|user|>" and backend.decode([1]) == ""
    # what other pieces spell is no reason to make a control token of a text's letters
    assert "the" not in built(**with_piece("zz", 3)).encode("zzz the").tokens


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": None}, CheckpointError, "tokens, scores and token_type of one length; .* 0"),
        ({"scores": [0.0]}, CheckpointError, "there are 460, 1 and 460. Fetch or convert"),
        ({"token_type": "x"}, CheckpointError, "there are 460, 460 and 0"),
        ({"tokens": []}, CheckpointError, "there are 0, 460"),
        (with_piece("a", 1, float("nan")), CheckpointError, "'a' with score nan"),
        (with_piece("a" * 2000, 1), CheckpointError, "a piece of 2000 characters; at most 1024"),
        (with_piece("a", 1), CheckpointError, "has the piece 'a' twice"),
        (
            listed(["<unk>", *("a" * length for length in range(1, 129))]),
            CheckpointError,
            "make each other in more than 2064 ways, 16 for each of 129",
        ),
        (with_piece("ae", 5), UnsupportedModelError, "unused piece 'ae'"),
        ({"precompiled_charsmap": [1, 2]}, UnsupportedModelError, "by 'precompiled_charsmap'"),
        ({"remove_extra_whitespaces": True}, UnsupportedModelError, "changes texts by"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"m\.gguf.*{message}"):
        built(**changes)


def test_one_that_cannot_spell_every_text_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="with 0 of 256 byte tokens and without"):
        built("without bytes", unknown_token_id=-1)


def test_a_vocabulary_as_large_as_any_is_built() -> None:
    """Every word of up to 15 letters, of two: far more merges than a trained vocabulary has."""
    words, level = ["<unk>"], [""]
    for _ in range(15):
        level = [word + letter for word in level for letter in "ab"]
        words += level
    backend = built("without bytes", unknown_token_id=0, **listed(words))
    assert backend.get_vocab_size() == len(words) == 2**16 - 1
    assert backend.encode("ab" * 7, add_special_tokens=False).tokens[-1] == "ab" * 7
