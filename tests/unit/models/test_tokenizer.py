"""Tokenizers from folders and GGUF metadata, and decoding token by token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from flashdraft.chat.templates import encode_chat
from flashdraft.errors import CheckpointError, RequestError, UnsupportedModelError
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.tokenizer import build_gguf_tokenizer
from flashdraft.models.sources import resolve_source
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.models.gguf.factory import LLAMA, random_values, write_gguf

GEMMA4 = Path(__file__).parents[4] / "shared" / "data" / "gemma4"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    "Hello world",
    "  two  spaces   three",
    "\n\n\t tab\r\n\r\n x",
    "3.14159 and 2024-01-01, 1234567",
    "def f(x):\n    return x**2  # ok\n",
    "naïve café — “quotes”",
    "日本語のテキスト",
    "🙂👨‍👩‍👧‍👦 emoji",
    "I'm you're we'll THEY'VE",
    "\u200b zero\u00a0nbsp",
    "مرحبا שלום",
    "½ ² ٣ Ⅷ",
    " ",
    "",
]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF vocabulary: two special tokens, the bytes, and a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "a b", "A Ì", "AÌ Ĭ"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = ["<s>", "</s>", "<think>", *ALPHABET, *words]
    types = [3, 3, 4] + [1] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def built(**changes: Any) -> Tokenizer:
    backend = build_gguf_tokenizer(byte_level_metadata(**changes), Path("m.gguf"))
    assert backend is not None
    return Tokenizer(backend)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([index], skip_special=False) for index in tokenizer.encode(text)]


def test_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        LLAMA,
        {"token_embd.weight": random_values(4, 64)},
        general={**byte_level_metadata(), "tokenizer.chat_template": "{{ messages }}"},
    )
    tokenizer = Tokenizer.from_checkpoint(path)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 3 + 256 + 10
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.encode("</s>hello") == [1, tokenizer.token_id("hello")]
    ids = tokenizer.encode("<s><think>hello é")
    assert tokenizer.decode(ids) == "<think>hello é"
    assert tokenizer.decode(ids, skip_special=False) == "<s><think>hello é"


def test_gguf_without_a_vocabulary(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA, {"x": random_values(4)})
    assert Tokenizer.from_checkpoint(path) is None


def test_splitting_rules_differ_where_they_should() -> None:
    assert pieces(built(pre="gpt-2"), "a123") == ["a", "123"]
    assert pieces(built(pre="smollm"), "a123") == ["a", "1", "2", "3"]
    assert pieces(built(pre="qwen2"), "a123") == ["a", "1", "2", "3"]
    assert pieces(built(pre="llama-bpe"), "a1231") == ["a", "123", "1"]


def test_qwen2_normalises_to_nfc() -> None:
    decomposed = "A\u030a"  # A and a ring; NFC has one letter for it
    assert built(pre="gpt-2").encode(decomposed) != built(pre="qwen2").encode(decomposed)
    assert built(pre="qwen2").encode(decomposed) == built(pre="qwen2").encode("\u00c5")


def test_bos_is_added_on_request_alone() -> None:
    assert built(add_bos_token=True).encode("ab", add_special=True)[0] == 0
    assert built(add_bos_token=True).encode("ab")[0] != 0
    assert built(add_bos_token=False).encode("ab", add_special=True)[0] != 0
    assert built(pre="llama-bpe").encode("ab", add_special=True)[0] == 0  # llama.cpp's default
    assert built(pre="gpt-2").encode("ab", add_special=True)[0] != 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "t5"}, UnsupportedModelError, "'t5'"),
        ({"pre": "tekken"}, UnsupportedModelError, "'tekken'.*smollm"),
        ({"merges": None}, UnsupportedModelError, "without merges"),
        ({"merges": ["nospace"]}, CheckpointError, "'nospace' is not a pair"),
        ({"merges": ["x unknown"]}, CheckpointError, "damaged"),
        ({"merges": 3}, CheckpointError, "must be lists"),
    ],
)
def test_bad_gguf_tokenizers(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        built(**changes)


@pytest.mark.weights
def test_smollm2_equals_the_reference() -> None:
    """The reference: transformers' byte-level BPE over the same vocabulary, with split digits."""
    transformers = pytest.importorskip("transformers")
    path = resolve_source("smollm2-135m").path
    tokenizer = Tokenizer.from_checkpoint(path)
    metadata = GGUFFile(path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    gpt2 = transformers.GPT2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        additional_special_tokens=tokens[:17],
    )
    reference = gpt2.backend_tokenizer
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), reference.pre_tokenizer]
    )
    assert tokenizer is not None
    generator = random.Random(0)
    alphabet = "abcXYZ  \n\t.,'\"0123é日🙂<|>_-=+"
    noise = ["".join(generator.choices(alphabet, k=40)) for _ in range(300)]
    for text in [*TEXTS, *noise, "<|im_start|>user\nHi<|im_end|>\n"]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special=False) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.special_ids == set(range(17))


def small_backend() -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(ALPHABET)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def test_folder(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(2)  # a training leftover that must not cut prompts
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "from config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer is not None
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert len(tokenizer.encode("hello")) == 5
    assert tokenizer.chat_template == "from config"
    (tmp_path / "chat_template.jinja").write_text("from its file")
    again = Tokenizer.from_checkpoint(tmp_path)
    assert again is not None and again.chat_template == "from its file"


def test_named_templates(tmp_path: Path) -> None:
    small_backend().save(str(tmp_path / "tokenizer.json"))
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer is not None and tokenizer.chat_template == "yes"


def test_folder_without_or_with_a_broken_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Tokenizer.from_checkpoint(tmp_path) is None and not caplog.records
    (tmp_path / "tokenizer.model").write_bytes(b"")
    assert Tokenizer.from_checkpoint(tmp_path) is None
    assert "token ids only" in caplog.text
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_checkpoint(tmp_path)


def test_a_lone_surrogate_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        built().encode("\ud800")


@pytest.mark.parametrize("texts", [["a", 5], [None], [["a"]]])
def test_what_is_no_text_is_refused_in_a_batch_too(texts: Any) -> None:
    with pytest.raises(RequestError, match=r"A prompt must be text\."):
        built().encode_batch(texts)


@pytest.mark.parametrize("ids", [[-1], [10**12], [10**30], ["a"], [None], [1.5], "ab", 5, None])
def test_what_is_no_token_id_is_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match=r"Token ids must be .* from 0 to 268\."):
        built().decode(ids)


@pytest.mark.parametrize("name", ["tools", "extra"])
@pytest.mark.parametrize("depth", [400, 600, 5000, None])
def test_values_of_any_depth_are_taken_or_refused_in_words(name: str, depth: int | None) -> None:
    """None: a value that contains itself."""
    value: dict[str, Any] = {}
    if depth is None:
        value["a"] = value
    for _ in range(depth or 0):
        value = {"a": value}
    tokenizer = built().with_template(
        "{{ messages[0].content }}{% if switched %}{{ tools }}{% endif %}"
    )
    given = {name: [value] if name == "tools" else {"switch": value}}
    messages = [{"role": "user", "content": "ab"}]
    if depth == 400:
        assert encode_chat(tokenizer, messages, **given) == tokenizer.encode("ab")
    else:
        with pytest.raises(RequestError, match="nested more than 500 levels deep"):
            encode_chat(tokenizer, messages, **given)


@pytest.mark.parametrize("depth", [600, 5000, None])
def test_tools_that_are_told_are_refused_in_words_too(depth: int | None) -> None:
    value: dict[str, Any] = {}
    if depth is None:
        value["a"] = value
    for _ in range(depth or 0):
        value = {"a": value}
    tools = [{"type": "function", "function": {"name": "f", "parameters": value}}]
    tokenizer = built().with_template("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="nested more than 500 levels deep"):
        encode_chat(tokenizer, [{"role": "user", "content": "ab"}], tools=tools)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, step: int) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip)
    shown = [decoder.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*shown, decoder.flush()]


def test_characters_are_held_until_complete() -> None:
    tokenizer = built()
    assert stream(tokenizer, tokenizer.encode("a🙂b"), True, 1) == ["a", "", "", "", "🙂", "b", ""]
    cut = tokenizer.encode("a🙂")[:-1]
    assert stream(tokenizer, cut, True, 1)[-1] == "\ufffd"  # never completed


@pytest.mark.parametrize("step", [1, 2, 3])
def test_streamed_text_equals_decoded_text(step: int) -> None:
    tokenizer = built()
    generator = random.Random(step)
    for _ in range(300):
        text = "".join(generator.choices("aé日🙂 👨‍👩‍👧", k=12))
        noise = [generator.randrange(tokenizer.vocab_size) for _ in range(30)]
        for ids in (tokenizer.encode(text), noise):
            for skip in (True, False):
                assert "".join(stream(tokenizer, ids, skip, step)) == tokenizer.decode(ids, skip)


def test_streaming_looks_at_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a model that repeats half a character for ever, or a special token."""
    tokenizer = built()
    half = tokenizer.encode("🙂")[0]
    longest = 0
    decode = tokenizer.decode

    def counted(ids: Any, skip_special: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special)

    monkeypatch.setattr(tokenizer, "decode", counted)
    for ids in ([half] * 500, [0] * 500, tokenizer.encode("hello 🙂 " * 100)):
        assert "".join(stream(tokenizer, ids, True, 1)) == decode(ids)
    assert longest < 16


def gemma4_metadata() -> dict[str, Any]:
    """A small vocabulary in Gemma 4's manner: characters, merges, byte tokens."""
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    merges = ["▁ a", "a b", "▁ ▁", "\n \n"]
    tokens = [*marks, *(f"<0x{b:02X}>" for b in range(256)), *"▁ab\n"]
    tokens += [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 4] + [6] * 256 + [1] * 8,
        "tokenizer.ggml.bos_token_id": 2,
    }


def test_gemma4_from_gguf() -> None:
    backend = build_gguf_tokenizer(gemma4_metadata(), Path("m.gguf"))
    assert backend is not None
    tokenizer = Tokenizer(backend)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}  # <turn|> too, though listed as user-defined
    text = " ab  a\n\né<turn|>"
    ids = tokenizer.encode(text, add_special=True)
    assert [backend.id_to_token(i) for i in ids] == [
        "<bos>", "▁a", "b", "▁", "▁a", "\n\n", "<0xC3>", "<0xA9>", "<turn|>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == " ab  a\n\né"
    assert stream(tokenizer, ids, True, 1)[-3:] == ["", "", "é"]  # a run of bytes is one piece


def test_byte_runs_stream_exactly() -> None:
    backend = build_gguf_tokenizer(gemma4_metadata(), Path("m.gguf"))
    assert backend is not None
    tokenizer = Tokenizer(backend)
    generator = random.Random(0)
    choice = [*tokenizer.encode("🙂éa"), 0, 5, 200]
    for _ in range(500):
        ids = generator.choices(choice, k=12)
        assert "".join(stream(tokenizer, ids, True, 1)) == tokenizer.decode(ids)


@pytest.mark.skipif(not GEMMA4.is_dir(), reason="the Gemma 4 tokenizer is not on this machine")
def test_gemma4_from_gguf_equals_its_tokenizer_json(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = (GEMMA4 / "tokenizer.json.zst").read_bytes()
    text = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    (tmp_path / "tokenizer.json").write_bytes(text)
    content = json.loads(text)
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    special = {entry["id"] for entry in content["added_tokens"]}
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 2,
    }
    backend = build_gguf_tokenizer(metadata, Path("m.gguf"))
    reference = Tokenizer.from_checkpoint(tmp_path)
    assert backend is not None and reference is not None
    tokenizer = Tokenizer(backend)
    assert tokenizer.special_ids == reference.special_ids
    for text in [*TEXTS, "<|turn>user\nHi<turn|>\n", "𒀀𒀁 \n\n\n\n x", "\t\t▁ꙮ\x00"]:
        ids = reference.encode(text, add_special=True)
        assert tokenizer.encode(text, add_special=True) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert "".join(stream(reference, ids, True, 1)) == reference.decode(ids)
