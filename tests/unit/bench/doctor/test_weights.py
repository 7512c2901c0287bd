"""What a pair's weights are, in words and fields; and what doctor says of few bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdraft.bench.doctor import remedy
from flashdraft.bench.doctor import target as doctor_target
from flashdraft.bench.doctor.expected import Expected
from flashdraft.bench.doctor.probe import Accepted, Patient
from flashdraft.bench.doctor.report import Measured
from flashdraft.bench.doctor.settings import Mode, Settings
from flashdraft.bench.doctor.target import find_low_precision, find_other_weights
from flashdraft.bench.doctor.weights import (
    ModelWeights,
    StoredWeights,
    read_weights,
    scheme_bits,
    stored_weights,
)
from flashdraft.bench.plan.gpus import find_card
from flashdraft.cli import main
from flashdraft.engine.config import CacheOptions
from flashdraft.errors import CapacityError
from flashdraft.kernels.kinds import Scheme, WeightOptions
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter
from tests.unit.models.gguf.factory import LLAMA, Types, random_values, write_gguf

KINDS = [Types.Q4_0, Types.Q4_0, Types.Q4_0, Types.Q8_0, Types.F16]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"))


def make_gguf(path: Path, kinds: list[Types]) -> Path:
    tensors = {f"blk.{i}.attn_q.weight": random_values(64, 64) for i in range(len(kinds))}
    formats = dict(zip(tensors, kinds, strict=True))
    norm = {"output_norm.weight": random_values(64)}
    return write_gguf(path, "llama", LLAMA, tensors | norm, formats)


def make_compressed(target: Path, folder: Path, method: str = "compressed-tensors") -> Path:
    """The tiny target with its MLPs packed: int4 in groups of 32, or fp8 in blocks."""
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        rows, depth = weight.shape
        if method == "fp8":
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale_inv"] = torch.ones(-(-rows // 128), -(-depth // 128))
        else:
            tensors[f"{module}.weight_packed"] = torch.zeros(rows, depth // 8, dtype=torch.int32)
            tensors[f"{module}.weight_scale"] = torch.ones(rows, depth // 32).bfloat16()
            tensors[f"{module}.weight_shape"] = torch.tensor([rows, depth])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    said: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    if method == "fp8":
        said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder


def gpu(
    quantize: Scheme | None = None, head: Scheme | None = None, least_values: int = 1
) -> SimpleNamespace:
    """What a GPU's kernels say of themselves."""
    return SimpleNamespace(
        name="triton",
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        weight_dtype="bfloat16",
        why_no_fp8_cache=None,
        quantize=quantize,
        quantize_head=head or (Scheme.INT8 if quantize is Scheme.INT4 else quantize),
        quantize_drafter=Scheme.INT8 if quantize is Scheme.INT4 else quantize,
        activations=None,
        holds=lambda num_values: num_values >= least_values,
    )


def on(kernels: SimpleNamespace, model: Path, folder: Path | None = None) -> Patient:
    """A pair whose weights lie in these folders, as far as reading them goes."""
    config = SimpleNamespace(cache=CacheOptions())
    llm = SimpleNamespace(
        model=str(model),
        kernels=kernels,
        drafter_name=None if folder is None else str(folder),
        engine=SimpleNamespace(config=config, target=None),
    )
    return Patient(cast(Any, llm), None, folder, Mode())


def target_on(kernels: SimpleNamespace, model: Path) -> ModelWeights:
    return read_weights(on(kernels, model)).target


# -- what the files hold ---------------------------------------------------------------------------


def test_a_gguf_of_several_kinds_names_the_majority_and_their_number(tmp_path: Path) -> None:
    mixed = stored_weights(make_gguf(tmp_path / "mixed.gguf", KINDS))
    assert mixed.describe() == "GGUF Q4_0 (3 of 5 matrices, 3 kinds)"
    assert mixed.kinds == {"Q4_0": 3, "Q8_0": 1, "F16": 1} and not mixed.is_float
    assert mixed.bits == pytest.approx((3 * 4.5 + 8.5 + 16) / 5)
    one = stored_weights(make_gguf(tmp_path / "one.gguf", KINDS[:3]))
    assert one.describe() == "GGUF Q4_0 (3 matrices)" and one.bits == pytest.approx(4.5)
    floats = stored_weights(make_gguf(tmp_path / "floats.gguf", [Types.F16]))
    assert floats.describe() == "GGUF F16" and floats.is_float


def test_compressed_tensors_and_fp8_say_how_they_are_cut(target: Path, tmp_path: Path) -> None:
    plain = stored_weights(target)
    assert plain.describe() == "float32" and plain.container == "safetensors"
    count = sum(plain.kinds.values())
    packed = stored_weights(make_compressed(target, tmp_path / "packed"))
    assert packed.container == "compressed-tensors" and not packed.is_float
    assert packed.kinds == {"float32": count - 6, "W4A16, groups of 32": 6}
    blocks = stored_weights(make_compressed(target, tmp_path / "fp8", "fp8"))
    assert blocks.kinds == {"float32": count - 6, "fp8, blocks of 128×128": 6}
    most = StoredWeights("compressed-tensors", {"W4A16, groups of 32": 9}, 4.5, False, 1, 1)
    assert most.describe() == "compressed-tensors W4A16, groups of 32 (9 matrices)"


# -- what becomes of them --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "said", "kept", "head", "bits"),
    [
        (gpu(), "kept as bfloat16 on this GPU", "bfloat16", "bfloat16", 16.0),
        (
            gpu(Scheme.INT4),
            "quantised to int4 on load (head int8)",
            "int4",
            "int8",
            4.5,
        ),
        (gpu(Scheme.FP8), "quantised to fp8 on load", "fp8", "fp8", 8.0),
        (
            gpu(Scheme.INT4, Scheme.FP8),
            "quantised to int4 on load (head fp8)",
            "int4",
            "fp8",
            4.5,
        ),
        (
            gpu(None, Scheme.FP8),
            "kept as bfloat16 on this GPU, its head quantised to fp8 on load, which saves "
            "0.0096 MB of memory and 0.0096 MB a step",  # a byte of each of 300 x 32 values
            "bfloat16",
            "fp8",
            16.0,
        ),
        (
            gpu(Scheme.INT8, least_values=2000),
            "quantised to int8 on load, small matrices as bfloat16",
            "int8",
            "int8",
            8.5,
        ),
        (
            gpu(Scheme.INT8, least_values=10**6),  # nothing is worth it
            "kept as bfloat16 on this GPU",
            "bfloat16",
            "bfloat16",
            16.0,
        ),
    ],
)
def test_floats_on_a_gpu(
    target: Path, kernels: SimpleNamespace, said: str, kept: str, head: str, bits: float
) -> None:
    found = target_on(kernels, target)
    assert found.text == f"float32, {said}"
    assert (found.kept_as, found.head_kept_as, found.bits) == (kept, head, bits)
    assert found.is_in_few_bits == (bits < 16)


def test_weights_that_are_stored_in_few_bits_on_a_gpu(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "mixed.gguf", KINDS)
    kept = target_on(gpu(), file)
    assert kept.text == "GGUF Q4_0 (3 of 5 matrices, 3 kinds), kept so on this GPU"
    assert kept.kept_as == "as stored" and kept.is_in_few_bits
    both = target_on(gpu(Scheme.INT8), file)
    assert both.text.endswith("kept so on this GPU; float matrices become int8 on load")
    small = target_on(gpu(least_values=10**6), file)  # too small to be unpacked at every step
    assert small.kept_as == "bfloat16" and small.bits == kept.bits


def make_with_head(path: Path, kind: Types) -> Path:
    tensors = {"blk.0.attn_output.weight": random_values(64, 64)}
    head = {"output.weight": random_values(128, 64), "token_embd.weight": random_values(128, 64)}
    formats = {"blk.0.attn_output.weight": Types.Q4_0, "output.weight": kind}
    formats |= {"token_embd.weight": Types.Q4_0}
    return write_gguf(path, "llama", LLAMA, tensors | head, formats)


def test_a_float_head_beside_weights_in_few_bits_says_what_few_bits_would_save(
    tmp_path: Path,
) -> None:
    file = make_with_head(tmp_path / "float_head.gguf", Types.F16)
    kept = target_on(gpu(), file)
    # 128 x 64 values of 16 bits in place of 8.5
    assert kept.text.endswith(
        "kept so on this GPU, its head as bfloat16: --quantize-head int8 would save 0.00768 MB of "
        "memory and 0.00768 MB a step"
    )
    assert (kept.kept_as, kept.head_kept_as) == ("as stored", "bfloat16")
    coded = target_on(gpu(None, Scheme.FP8), file)
    assert "its head quantised to fp8 on load, which saves 0.00819 MB of memory" in coded.text
    assert coded.head_kept_as == "fp8"
    in_few = target_on(gpu(), make_with_head(tmp_path / "few.gguf", Types.Q8_0))
    assert in_few.text.endswith("kept so on this GPU") and in_few.head_kept_as == "as stored"
    too_small = target_on(gpu(least_values=2**13 + 1), file)
    assert "--quantize-head" not in too_small.text


def test_a_drafter_without_a_head_reads_the_targets_again(tmp_path: Path) -> None:
    file = make_with_head(tmp_path / "float_head.gguf", Types.F16)
    for own_head, saved in ((None, "0.0154 MB a step"), (torch.nn.Identity(), "0.00768 MB a step")):
        drafter = cast(Any, SimpleNamespace(lm_head=own_head))
        found = read_weights(replace(on(gpu(), file), drafter=drafter)).target
        assert found.text.endswith(f"would save 0.00768 MB of memory and {saved}")


def test_the_drafter_beside_an_int4_target(target: Path, drafter: Path) -> None:
    found = read_weights(on(gpu(Scheme.INT4), target, drafter))
    assert found.drafter is not None and found.drafter.kept_as == "int8"
    assert found.text == (
        "target float32, quantised to int4 on load (head int8) · drafter float32, quantised to "
        "int8 on load · keys and values in bfloat16"
    )
    assert found.to_json()["target"] == {
        "container": "safetensors",
        "kinds": found.target.stored.kinds,
        "stored_bits": 32.0,
        "kept_as": "int4",
        "head_kept_as": "int8",
        "bits": 4.5,
        "text": found.target.text,
    }


def test_keys_that_are_not_stored_are_said(target: Path) -> None:
    patient = on(gpu(), target)
    stored = read_weights(patient)
    cast(Any, patient.llm.engine.config).cache = CacheOptions(kv_keys="rebuilt")
    rebuilt = read_weights(patient)
    assert rebuilt.text == f"{stored.text} · shared keys rebuilt"
    assert [one.to_json()["kv_keys"] for one in (stored, rebuilt)] == ["stored", "rebuilt"]


def test_the_bits_of_every_scheme_are_those_of_plan() -> None:
    assert [scheme_bits(one) for one in (Scheme.INT4, Scheme.INT8, Scheme.FP8)] == [4.5, 8.5, 8.0]


# -- the command -----------------------------------------------------------------------------------


def run_doctor(*arguments: str | Path) -> int:
    return main(["doctor", "--device", "cpu", "--seconds", "20", *map(str, arguments)])


@pytest.mark.parametrize(
    ("dtype", "kept", "kv"), [("int8", "int8", "float32"), ("float32", "float32", "float32")]
)
def test_doctor_says_what_the_weights_are(
    target: Path,
    drafter: Path,
    dtype: str,
    kept: str,
    kv: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.json"
    run_doctor("--model", target, "--draft", drafter, "--dtype", dtype, "--json", path)
    shown = " ".join(capsys.readouterr().out.split())
    line = f"target float32, kept as {kept} on this CPU · drafter float32, kept as {kept}"
    assert line in shown and f"keys and values in {kv}" in shown
    report = json.loads(path.read_text())
    assert report["weights"]["kv_dtype"] == kv
    assert report["weights"]["drafter"]["kept_as"] == report["weights"]["target"]["kept_as"] == kept
    assert report["settings"]["quantize"] is None and report["settings"]["kv_dtype"] == "auto"
    area = [one for one in report["findings"] if one["area"] == "environment"]
    assert area[-1]["text"].startswith("target float32")


def test_the_cache_of_the_examination_is_the_one_asked_for(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ("--draft", "ngram", "--dtype", "bfloat16", "--kv-dtype", "fp8", "--json", path)
    run_doctor("--model", target, *flags)
    weights = json.loads(path.read_text())["weights"]
    assert weights["kv_dtype"] == "float8_e4m3fn" and weights["drafter"] is None


# -- the cause -------------------------------------------------------------------------------------


def low(length: float = 2.0) -> Measured:
    accepted = Accepted(length, (0.5,), 400, 200)
    expected = Expected(3.0, 8.0, (0.5,), "", True)
    return Measured([[1]], accepted, None, [], expected, expected)


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The targets that doctor compares with, each accepting twice as much."""
    seen: list[tuple[Any, ...]] = []

    def run(
        patient: Patient, measured: Measured, model: str, deadline: float, *formats: WeightOptions
    ) -> tuple[Accepted, float]:
        seen.append((Path(model).name, *formats))
        return Accepted(4.0, (0.8,), 400, 100), 0.9

    monkeypatch.setattr(doctor_target, "_run_reference", run)
    monkeypatch.setattr(remedy, "this_machine", lambda: find_card("rtx4090"))
    return seen


def trained_on(drafter: Path, folder: Path, target: Path, **formats: str | None) -> Path:
    """The drafter with a record of the target that it was trained on."""
    folder.mkdir()
    for file in drafter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    record = {"target": {"name": str(target), **formats}}
    (folder / "flashdraft.json").write_text(json.dumps(record))
    return folder


def test_bits_that_were_taken_on_load_are_the_cause_and_more_of_them_the_remedy(
    target: Path, drafter: Path, tmp_path: Path, references: list[tuple[Any, ...]]
) -> None:
    folder = trained_on(drafter, tmp_path / "drafter", target)
    patient = on(gpu(Scheme.INT4), target, folder)
    [cause] = find_other_weights(patient, low(), 1e9) or []
    assert cause.name == "quantised target" and references == [(target.name, WeightOptions())]
    assert "float32, quantised to int4 on load (head int8): 4.5 bits a weight" in cause.text
    assert (cause.before, cause.after) == (2.0, 4.0)
    assert "leave --quantize out (bf16 fits here)" in cause.remedy
    asked = f"flashdraft train {target} --quantize int4 --quantize-head int8 --out FOLDER"
    assert asked in cause.remedy and "as in training" not in cause.remedy
    assert f"flashdraft plan {target} says which formats fit" in cause.remedy


def test_a_drafter_that_was_trained_on_few_bits_is_run_on_them(
    target: Path, drafter: Path, tmp_path: Path, references: list[tuple[Any, ...]]
) -> None:
    formats = {"quantize": "int4", "quantize_head": "int8"}
    folder = trained_on(drafter, tmp_path / "drafter", target, **formats)
    assert find_other_weights(on(gpu(Scheme.INT4), target, folder), low(), 1e9) == []
    assert references == []  # there is no other target to compare with
    [cause] = find_other_weights(on(gpu(), target, folder), low(), 1e9) or []
    assert "give --quantize int4 --quantize-head int8 as in training" in cause.remedy
    assert references == [(target.name, WeightOptions("int4", "int8"))]
    assert "in int4 (head int8), and this target is float32, kept as bfloat16" in cause.text


def test_a_reference_that_does_not_fit_is_no_proof(
    target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CapacityError("61 GB of weights, 24 GB of memory")

    monkeypatch.setattr(doctor_target, "_run_reference", full)
    monkeypatch.setattr(remedy, "this_machine", lambda: find_card("rtx4090"))
    folder = trained_on(drafter, tmp_path / "drafter", target)
    patient = on(gpu(Scheme.INT4), target, folder)
    assert find_other_weights(patient, low(), 1e9) == []
    monkeypatch.setattr(doctor_target, "_FEW_BITS", 5.0)
    [cause] = find_other_weights(patient, low(), 1e9) or []
    assert "cannot be run here beside it" in cause.text and cause.after is None


def test_a_files_own_format_is_named(
    target: Path,
    drafter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    references: list[tuple[Any, ...]],
) -> None:
    file = make_gguf(tmp_path / "mixed.gguf", KINDS)
    folder = trained_on(drafter, tmp_path / "drafter", Path("org/name"))
    monkeypatch.setattr(doctor_target, "_is_here", lambda name, model: True)
    [cause] = find_other_weights(on(gpu(), file, folder), low(), 1e9) or []
    assert "for org/name, and this target is GGUF Q4_0 (3 of 5 matrices, 3 kinds)" in cause.text
    assert "7.6 bits a weight" in cause.text
    assert cause.remedy.startswith("use org/name, or a format of more bits, or train a drafter")


def test_eight_bits_on_a_cpu_are_named_with_what_they_were_made_of(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Patient.load(Settings(str(target), str(drafter), "cpu", "int8", Mode()))
    dtypes = []

    def run(*_: object, dtype: str) -> tuple[Accepted, float]:
        dtypes.append(dtype)
        return Accepted(4.0, (0.8,), 400, 100), 0.9

    monkeypatch.setattr(doctor_target, "_run_reference", run)
    [cause] = find_low_precision(patient, low(), 1e9) or []
    assert dtypes == ["float32"] and "float32, kept as int8 on this CPU" in cause.text
    assert "use --dtype float32" in cause.remedy and "flashdraft plan" in cause.remedy
