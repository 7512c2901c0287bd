"""Quality by weight format: the quantisers, the files they make, what is measured, the tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from benchmarks import formats, formats_blocks, formats_measure, formats_table
from benchmarks.formats import Bench, RoundingKernels, breaks_law, run
from benchmarks.formats_blocks import encode
from benchmarks.formats_files import FORMATS, ROUNDED, Format, make_checkpoint, stored_kind
from benchmarks.formats_measure import (
    Answers,
    Text,
    compare_lengths,
    compare_texts,
    describe_answers,
    plain_engine,
    read_text,
    repeated_share,
    sample_texts,
)
from benchmarks.formats_table import BEGIN, COLUMNS, END, section, table, with_section
from flashdraft import LLM
from flashdraft.core import FinishReason, Generation, GenerationStats, TokenLogprob
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import quantize, round_rows
from flashdraft.models.gguf.blocks import unpack_blocks
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.values import read_tensor
from tests.tiny import CHAT_TEMPLATE, VOCAB_SIZE, make_tiny_drafter, make_tiny_tokenizer

SIMPLE = ("Q4_0", "Q5_0", "Q8_0")
# relative error of normally distributed values: about the best that so many bits can do
BOUNDS = {"Q4_0": 0.09, "Q5_0": 0.045, "Q8_0": 0.006, "Q4_K": 0.075, "Q6_K": 0.018}
HIDDEN, INNER = 32, 256  # of the tiny target: only rows of INNER values divide into super-blocks


def random_rows(heavy: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(64, 768, generator=generator) * 0.05
    return values * torch.randn(64, 768, generator=generator).exp() if heavy else values


def special_rows() -> torch.Tensor:
    """Rows in which something is missing, or all the same, or of one sign only."""
    values = random_rows()[:8].clone()
    values[0] = 0
    values[1] = 0.25
    values[2] = -0.25
    values[3] = values[3].abs()
    values[4] = -values[4].abs() - 1
    values[5, :256] = 0
    values[6] *= 1e-4
    values[7, ::7] = 100.0
    return values


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("rows", [random_rows(), random_rows(heavy=True), special_rows()])
def test_blocks_are_read_alike_by_the_gguf_package(kind: str, rows: torch.Tensor) -> None:
    blocks = encode(rows, kind).view(len(rows), -1)
    theirs = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    ours = unpack_blocks(blocks, kind).dequantize()
    assert ours.isfinite().all()
    assert np.array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("rows", [random_rows(), random_rows(heavy=True), special_rows()])
def test_simple_blocks_are_those_of_the_gguf_package(kind: str, rows: torch.Tensor) -> None:
    theirs = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(encode(rows, kind).numpy(), theirs.flatten())


def error_of(kind: str, rows: torch.Tensor) -> float:
    values = unpack_blocks(encode(rows, kind).view(len(rows), -1), kind).dequantize()
    return float((values - rows).norm() / rows.norm())


@pytest.mark.parametrize("kind", BOUNDS)
def test_errors_are_small(kind: str) -> None:
    assert error_of(kind, random_rows()) < BOUNDS[kind]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_search_pays(kind: str, heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = error_of(kind, random_rows(heavy))
    monkeypatch.setattr(formats_blocks, "_AFFINE_STEPS", ())  # extremes alone set the scale
    monkeypatch.setattr(formats_blocks, "_SYMMETRIC_STEPS", ())
    assert searched < 0.99 * error_of(kind, random_rows(heavy))


def test_what_a_file_holds_is_what_llama_cpp_would_store() -> None:
    wide, narrow = (576, 1536), (1536, 576)
    assert stored_kind("Q4_K", "blk.0.ffn_down.weight", wide, True) == "Q4_K"
    assert stored_kind("Q4_K", "blk.0.ffn_up.weight", narrow, True) == "Q5_0"
    assert stored_kind("Q6_K", "blk.0.ffn_up.weight", narrow, True) == "Q8_0"
    assert stored_kind("Q4_0", "blk.0.ffn_up.weight", narrow, True) == "Q4_0"
    assert stored_kind("Q4_0", "token_embd.weight", narrow, True) == "Q8_0"
    assert stored_kind("Q4_0", "token_embd.weight", wide, True) == "Q6_K"
    assert stored_kind("Q4_0", "token_embd.weight", narrow, False) == "Q4_0"
    assert stored_kind("Q4_K", "blk.0.attn_norm.weight", (576,), True) == "F32"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    """A tiny Llama with a tokenizer, its matrices Q8_0 as some published file would have them."""
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(7)
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_add_bos_token(False)
    writer.add_tokenizer_model("gpt2")
    model = json.loads(make_tiny_tokenizer().to_str())["model"]
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (VOCAB_SIZE - 3))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in tiny_tensors():
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim > 1 else None
        stored = values if kind is None else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def tiny_tensors() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    generator = np.random.default_rng(3)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN // 2, HIDDEN),
        "attn_v": (HIDDEN // 2, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    every = {f"blk.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    every |= {"token_embd": (VOCAB_SIZE, HIDDEN), "output_norm": (HIDDEN,)}
    for name, shape in every.items():
        values = 0.2 * generator.standard_normal(shape) + (1.0 if len(shape) == 1 else 0.0)
        yield f"{name}.weight", values.astype(np.float32)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"))


def form(name: str) -> Format:
    return next(one for one in FORMATS if one.name == name)


def test_written_files_are_whole(source: GGUFFile, drafter: Path, tmp_path: Path) -> None:
    made = make_checkpoint(form("GGUF Q4_K"), source, drafter, tmp_path, on_gpu=False)
    old, new = gguf.GGUFReader(source.path), gguf.GGUFReader(made.target)
    changed = {"GGUF.tensor_count", "GGUF.kv_count", "GGUF.version"}
    for name in old.fields.keys() - changed:
        assert new.fields[name].types == old.fields[name].types, name
        if name != "general.file_type":
            assert new.fields[name].contents() == old.fields[name].contents(), name
    assert new.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_S
    file = GGUFFile(made.target)
    kinds = {"token_embd": "Q8_0", "ffn_down": "Q4_K"}
    for tensor in new.tensors:
        plain = tensor.name.removesuffix(".weight").rpartition(".")[2]
        expected = "F32" if "norm" in plain else kinds.get(plain, "Q5_0")
        assert tensor.tensor_type.name == expected, tensor.name
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(read_tensor(file, tensor.name).numpy(), theirs), tensor.name
        original = read_tensor(source, tensor.name)
        distance = (torch.tensor(theirs) - original).norm() / original.norm()
        assert distance < (1e-7 if expected == "F32" else 0.1)


def test_a_checkpoint_says_how_its_weights_are_held(
    source: GGUFFile, drafter: Path, tmp_path: Path
) -> None:
    down, table_size = 2 * HIDDEN * INNER, VOCAB_SIZE * HIDDEN
    number = 3 * down + 2 * 3 * HIDDEN * HIDDEN + table_size
    made = make_checkpoint(form("GGUF Q4_K"), source, drafter, tmp_path, on_gpu=False)
    assert made.held_as["Q4_K"] == pytest.approx(down / number, abs=1e-4)
    assert made.held_as["Q8_0"] == pytest.approx(table_size / number, abs=1e-4)
    expected = (4.5 * down + 8.5 * table_size + 5.5 * (number - down - table_size)) / number
    assert made.bits == pytest.approx(expected, abs=1e-3)
    made = make_checkpoint(form("int4"), source, drafter, tmp_path, on_gpu=True)
    assert made.bits == pytest.approx(4.5 + 4 * table_size / number, abs=1e-3)
    assert set(made.held_as) == {"int4", "int8"} and made.drafter == drafter
    assert set(GGUFFile(made.target).tensors["token_embd.weight"].format) >= {"BF16"}
    reference = make_checkpoint(form("bf16"), source, drafter, tmp_path, on_gpu=False)
    assert (reference.bits, reference.held_as) == (16.0, {"bf16": 1.0})


def test_on_the_cpu_values_are_those_of_quantize(
    source: GGUFFile, drafter: Path, tmp_path: Path
) -> None:
    made = make_checkpoint(form("int4"), source, drafter, tmp_path, on_gpu=False)
    file = GGUFFile(made.target)
    for name, scheme in {"token_embd": Scheme.INT8, "blk.1.ffn_up": Scheme.INT4}.items():
        values = read_tensor(source, f"{name}.weight").bfloat16().float()
        expected = quantize(values, scheme).dequantize()
        assert torch.equal(read_tensor(file, f"{name}.weight"), expected)
    assert made.drafter != drafter, "beside int4 the drafter gets 8 bits"


def test_every_format_of_a_tiny_pair_is_measured(
    source: GGUFFile, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "PROMPTS", ["the quick fox", "the lazy dog"])
    monkeypatch.setattr(formats, "LICENSE_TOKENS", 70)
    rows = list(run(source, drafter, Bench("cpu", 12), tmp_path, on_gpu=False, keep=False))
    assert [row["format"] for row in rows] == [one.name for one in FORMATS]
    assert not list(tmp_path.glob("*.gguf")), "nothing is kept unasked"
    first, *others = rows
    for figures in first["texts"].values():
        assert figures["perplexity_ratio"] == figures["top1_agreement"] == 1
        assert figures["mean_kl"] == figures["perplexity_ratio_error"] == 0
    assert first["texts"]["license"]["tokens"] == 69
    for row in others:
        assert all(figures["mean_kl"] > 0 for figures in row["texts"].values()), row["format"]
        assert not breaks_law(row, on_gpu=False)
    by_name = {row["format"]: row["texts"]["license"]["mean_kl"] for row in rows}
    assert by_name["int8"] < by_name["GGUF Q4_0"] / 10
    assert first["answers"]["prompts"] == 2 and first["answers"]["accepted_ratio"] == 1
    document = {"environment": {}, "settings": {}, "rows": rows}
    assert len(table(document)) == 2 + len(FORMATS)


def test_activations_are_rounded_beside_weights(
    source: GGUFFile, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the target's layers alone; and models that are loaded later are not."""
    monkeypatch.setattr(formats, "PROMPTS", ["the quick fox", "the lazy dog"])
    monkeypatch.setattr(formats, "LICENSE_TOKENS", 70)
    settings = Bench("cpu", 12), tmp_path, False, False
    rows = list(run(source, drafter, *settings, ROUNDED))
    assert [row["format"] for row in rows] == [one.name for one in ROUNDED]
    found = {row["format"]: row["texts"]["license"]["mean_kl"] for row in rows}
    for scheme in ("fp8", "int8"):
        assert 0 < found[scheme] < found[f"{scheme}, activations too"]
    assert not any(breaks_law(row, on_gpu=False) for row in rows)
    kernels = RoundingKernels(Scheme.FP8)
    weight, x = torch.randn(8, 32), torch.randn(3, 32)
    plain, rounded = kernels.pack_head(weight), kernels.pack(weight)
    torch.testing.assert_close(kernels.linear(x, plain), x @ weight.T)
    expected = round_rows(x, Scheme.FP8) @ weight.T
    torch.testing.assert_close(kernels.linear(x, rounded), expected)
    assert torch.equal(kernels.linear(x[:1], rounded), kernels.linear(x, rounded)[:1])


@pytest.fixture(scope="module")
def tiny(source: GGUFFile) -> LLM:
    return LLM(source.path, draft=None, device="cpu", dtype="float32", cache_gb=0.1)


def test_a_text_is_read_the_same_in_any_pieces(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = plain_engine(tiny.engine.target)
    ids = [7 * i % VOCAB_SIZE for i in range(150)]
    rows = read_text(engine, Text(ids, 5))
    assert rows.shape == (145, VOCAB_SIZE)
    assert torch.allclose(rows.exp().sum(-1), torch.ones(145), atol=1e-5)
    monkeypatch.setattr(formats_measure, "ROWS_AT_ONCE", 1000)
    assert torch.equal(read_text(engine, Text(ids, 5)), rows)
    (scored,) = tiny.generate([ids[:20]], formats_measure.SamplingParams(max_tokens=1, logprobs=1))
    assert scored.logprobs is not None
    token, logprob = scored.logprobs[0].top[0]
    assert rows[15].argmax() == token and rows[15, token].item() == pytest.approx(logprob, abs=1e-5)


def test_sampled_texts_count_from_the_answer(tiny: LLM) -> None:
    engine = plain_engine(tiny.engine.target)
    texts = sample_texts(engine, [[5, 6, 7], [8, 9]], 6)
    assert [text.ids[: text.first] for text in texts] == [[5, 6, 7], [8, 9]]
    assert all(1 <= len(text.scored) <= 6 for text in texts)
    assert sample_texts(engine, [[5, 6, 7], [8, 9]], 6) == texts, "the seeds are fixed"


def test_texts_are_compared_token_by_token() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    found = compare_texts([Text([9, 0, 0], 1)], [reference], lambda text: other)
    assert found["tokens"] == 2 and found["top1_agreement"] == 0.5
    assert found["perplexity"] == pytest.approx((0.25 * 0.8) ** -0.5, abs=1e-4)
    assert found["perplexity_ratio"] == pytest.approx(2**0.5, abs=1e-4)
    divergence = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert found["mean_kl"] == pytest.approx(divergence / 2, abs=1e-6)
    assert found["perplexity_ratio_error"] == pytest.approx(2**0.5 * np.log(2) / 2, abs=1e-4)


def test_lengths_are_pooled_and_compared() -> None:
    assert compare_lengths([(30, 10), (10, 10)], [(20, 10), (20, 10)])[0] == pytest.approx(1.0)
    ratio, error = compare_lengths([(30, 10), (60, 20)], [(10, 10), (20, 20)])
    assert (ratio, error) == (pytest.approx(3.0), pytest.approx(0.0))
    assert compare_lengths([(30, 10), (10, 10)], [(20, 10), (20, 10)])[1] > 0.4


def test_repeated_text_is_noticed() -> None:
    assert repeated_share([[1, 2, 3, 4, 5, 6]]) == 0
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4], [5, 6, 7]]) == pytest.approx(1 / 5)
    assert repeated_share([[7] * 10]) == pytest.approx(6 / 7)


def generation(tokens: list[int], steps: int = 2, margin: float = 0.0) -> Generation:
    stats = GenerationStats(steps=steps, decode_tokens=len(tokens) - 1)
    top = TokenLogprob(-0.1, ((tokens[0], -0.1), (99, -0.1 - margin)))
    return Generation("", tokens, FinishReason.LENGTH, stats, [top] * len(tokens))


def test_answers_that_part_are_counted_with_their_margins() -> None:
    plain = [generation([1, 2, 3]), generation([1, 2, 3], margin=0.125), generation([4, 5, 6])]
    drafted = [generation([1, 2, 3]), generation([1, 2, 4]), generation([4, 5, 6], steps=1)]
    found = describe_answers(Answers(plain, drafted))
    assert (found["num_parted"], found["margins"]) == (1, [0.125])
    assert found["accepted_length"] == pytest.approx(6 / 5)
    assert "accepted_ratio" not in found
    row = {"answers": found, "answers_exact": {"num_parted": 0}}
    assert breaks_law(row, on_gpu=False) and not breaks_law(row, on_gpu=True)


def committed() -> dict[str, Any]:
    return dict(formats_table.read_documents(formats_table.RESULTS))


def test_the_committed_results_hold_the_law_for_every_format() -> None:
    document = committed()["formats_cpu.json"]
    assert [row["format"] for row in document["rows"]] == [one.name for one in FORMATS]
    assert "Q4_1" in document["settings"]["model"]
    for row in document["rows"]:
        assert row["answers"]["prompts"] >= 20
        assert not breaks_law(row, on_gpu=False), row["format"]


def test_the_docs_show_the_committed_results() -> None:
    text = formats_table.DOCS.read_text(encoding="utf-8")
    assert with_section(text, section(committed())) == text, "run benchmarks.formats --docs"


def test_the_table_has_a_column_for_exact_runs_where_there_are_some() -> None:
    document = json.loads(json.dumps(committed()["formats_cpu.json"]))
    widths = {line.count("|") for line in table(document)}
    assert widths == {len(COLUMNS) + 1}
    for row in document["rows"]:
        row["answers_exact"] = {"num_parted": 0, "prompts": 20, "margins": []}
    document["rows"][1]["answers"] |= {"num_parted": 2, "margins": [0.0, 0.125]}
    lines = table(document)
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 2}
    assert lines[3].endswith("| 2 of 20, margins ≤ 0.125 | 0 of 20 |")
    assert "Q4_1" in lines[2], "the reference's own line says what it is"


@pytest.mark.parametrize("text", ["nothing", BEGIN, f"{END}\n{BEGIN}"])
def test_the_docs_need_their_markers(text: str) -> None:
    with pytest.raises(RequestError, match="needs one line"):
        with_section(text, "")


def test_a_missing_model_is_an_error_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.gguf"
    path.write_bytes(b"not a model")
    assert formats.main(["--model", str(path)]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert formats.main(["--device", "cuda"]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_on_a_gpu_weights_must_have_stayed_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pytest.importorskip("flashdraft.kernels.cuda.backend")
    monkeypatch.setattr(backend, "MIN_QUANTIZED_VALUES", 1 << 23)
    formats.hold_small_weights()
    assert backend.MIN_QUANTIZED_VALUES == 0
    monkeypatch.setattr(formats.gc, "get_objects", lambda: ["a tensor, perhaps"])
    assert formats.count_packed(form("bf16")) == 0
    with pytest.raises(FlashdraftError, match="became bfloat16"):
        formats.count_packed(form("GGUF Q4_0"))
    assert "lowered" in formats.describe_settings(True, 96, 15)["small_weights"]


def test_a_grid_that_fits_is_found_again() -> None:
    """Why the default target's figures are not those of a bf16 original: docs/quantized.md."""
    kind = gguf.GGMLQuantizationType.Q4_1
    stored = gguf.quants.quantize(random_rows().numpy(), kind)
    rows = torch.tensor(gguf.quants.dequantize(stored, kind))
    assert error_of("Q4_K", rows) < 0.03 < 0.07 < error_of("Q4_K", random_rows())
    assert error_of("Q4_0", rows) > 0.08
