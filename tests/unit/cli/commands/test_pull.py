"""`flashdraft pull`, `list` and `rm`, and what serve and generate fetch by themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from flashdraft.children import python_command, python_environment
from flashdraft.cli import main
from flashdraft.models import sources
from flashdraft.models.files import locks, meter, transfer
from flashdraft.models.files.hub_cache import HubFolder
from flashdraft.models.files.packaged import PackagedModel, cache_folder
from tests.hub import COMMIT, FakeHub, hub_in_use

NAME, TARGET = "org/name", "Qwen/Qwen3-4B"
DRAFTER = "z-lab/Qwen3-4B-DFlash-b16"
ROOT = Path(__file__).parents[4]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(transfer, "_WAITS_S", (0.0,))
    with hub_in_use(monkeypatch, tmp_path) as hub:
        for name in (NAME, TARGET, DRAFTER):
            hub.add(name)
        yield hub


def ask(capsys: Captured, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


def listed(capsys: Captured) -> dict[str, dict[str, Any]]:
    _, out, _ = ask(capsys, "list", "--json")
    content = json.loads(out)
    assert content["num_bytes"] == sum(one["num_bytes"] for one in content["models"])
    return {one["name"]: one for one in content["models"]}


# -- pull --------------------------------------------------------------------------------------


def test_a_target_comes_with_its_drafter(hub: FakeHub, capsys: Captured) -> None:
    code, out, err = ask(capsys, "pull", TARGET)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == [TARGET, DRAFTER]
    assert all(Path(line.split()[1]).is_dir() for line in out.splitlines())
    assert f"Fetching {TARGET}" in err and f"Fetched {DRAFTER}" in err
    code, out, err = ask(capsys, "pull", TARGET, "--json")
    assert (code, err) == (0, "")  # all of it is here
    assert [(m["name"], m["role"], m["origin"]) for m in json.loads(out)["models"]] == [
        (TARGET, "target", "hub"),
        (DRAFTER, "drafter", "hub"),
    ]


def test_without_its_drafter_or_with_another(hub: FakeHub, capsys: Captured) -> None:
    assert len(ask(capsys, "pull", TARGET, "--draft", "none")[1].splitlines()) == 1
    assert ask(capsys, "pull", TARGET, "--draft", NAME)[1].splitlines()[1].startswith(NAME)
    code, out, err = ask(capsys, "pull", NAME)
    assert code == 0 and len(out.splitlines()) == 1
    assert f"No drafter is known for {NAME}" in err


def test_what_is_on_this_machine_is_not_pulled(
    hub: FakeHub, capsys: Captured, tmp_path: Path
) -> None:
    code, _, err = ask(capsys, "pull", str(tmp_path))
    assert code == 2 and "on this machine, so there is nothing to fetch" in err
    code, _, err = ask(capsys, "pull", "no-such-model")
    assert code == 2 and "There is no model 'no-such-model'" in err


def test_why_a_pull_fails(hub: FakeHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refusals[DRAFTER] = 403, {"X-Error-Code": "GatedRepo"}
    code, out, err = ask(capsys, "pull", TARGET)
    assert (code, out) == (2, "")
    assert f"accept its licence at https://huggingface.co/{DRAFTER} and set HF_TOKEN" in err
    monkeypatch.setattr(meter.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    code, _, err = ask(capsys, "pull", NAME)
    assert code == 2 and "no room for org/name: fetching takes 78 kB, 1 kB are free" in err
    assert ask(capsys, "pull", "org/other")[0] == 2


def test_ctrl_c_keeps_the_part_and_the_next_pull_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    environment = python_environment() | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    environment |= {"HF_HUB_OFFLINE": "0", "FLASHDRAFT_HOME": str(tmp_path), "TERM": "dumb"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_TOKEN": "hf_secret"}
    hub.hold = threading.Event()
    command = python_command("-m", "flashdraft", "pull", NAME)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert hub.is_holding.wait(60)
    process.send_signal(signal.SIGINT)
    hub.hold.set()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Interrupted;" in err and "are kept. The same command goes on from there." in err
    assert "Traceback" not in err and "hf_secret" not in out + err
    hub.hold = None
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.split()[1])
    assert (path / "model-1.safetensors").read_bytes() == hub.models[NAME]["model-1.safetensors"]


@pytest.mark.parametrize("words", [["generate", "x", "--model"], ["serve", "--port", "0"]])
def test_others_fetch_in_the_same_way(hub: FakeHub, capsys: Captured, words: list[str]) -> None:
    code, _, err = ask(capsys, *words, TARGET)
    assert code == 2 and err.count("flashdraft: error:") == 1  # it is no model, but it is fetched
    assert f"Fetched {TARGET}" in err and f"Fetched {DRAFTER}" in err
    hub.refusals["org/gated"] = 401, {"X-Error-Code": "GatedRepo"}
    hub.add("org/gated")
    code, _, err = ask(capsys, *words, "org/gated")
    assert code == 2 and "https://huggingface.co/org/gated and set HF_TOKEN" in err


# -- what a GGUF model sees with -------------------------------------------------------------------

SEEING = "org/seeing-GGUF"
TOWERS = {f"mmproj-{kind}.gguf": b"GGUF" + kind.encode() * 100 for kind in ("F32", "F16", "BF16")}


@pytest.fixture
def seeing(hub: FakeHub) -> str:
    hub.models[SEEING] = {"q4.gguf": b"GGUF" * 1000, "sub/mmproj-BF16.gguf": b"GGUF", **TOWERS}
    return f"{SEEING}:q4.gguf"


def test_a_gguf_model_comes_with_what_it_sees_with(
    hub: FakeHub, seeing: str, capsys: Captured
) -> None:
    code, out, err = ask(capsys, "pull", seeing)
    assert code == 0 and f"Fetched {seeing}" in err
    assert f"Fetching {SEEING}:mmproj-BF16.gguf: 404 bytes in 1 file." in err
    path = Path(out.split()[1])
    assert sorted(one.name for one in path.parent.iterdir()) == ["mmproj-BF16.gguf", "q4.gguf"]
    assert (path.parent / "mmproj-BF16.gguf").read_bytes() == TOWERS["mmproj-BF16.gguf"]
    code, again, err = ask(capsys, "pull", seeing)
    assert (code, again) == (0, out) and "Fetch" not in err  # all of it is here
    assert listed(capsys).keys() == {seeing, f"{SEEING}:mmproj-BF16.gguf"}
    assert ask(capsys, "rm", seeing)[0] == 0
    rows = listed(capsys)
    assert rows.keys() == {f"{SEEING}:mmproj-BF16.gguf"}
    assert rows[f"{SEEING}:mmproj-BF16.gguf"]["num_bytes"] == 404
    assert ask(capsys, "rm", f"{SEEING}:mmproj-BF16.gguf")[0] == 0
    assert not HubFolder(SEEING).path.exists()


@pytest.mark.parametrize("words", [["generate", "x", "--model"], ["serve", "--port", "0"]])
def test_who_uses_it_fetches_it_too(
    hub: FakeHub, seeing: str, capsys: Captured, words: list[str]
) -> None:
    ask(capsys, *words, seeing, "--no-vision")
    assert listed(capsys).keys() == {seeing}
    ask(capsys, *words, seeing, "--mmproj", f"{SEEING}:mmproj-F16.gguf")
    assert listed(capsys).keys() == {seeing, f"{SEEING}:mmproj-F16.gguf"}
    ask(capsys, *words, seeing)
    assert f"{SEEING}:mmproj-BF16.gguf" in listed(capsys)


def test_it_can_stay_where_it_is(hub: FakeHub, seeing: str, capsys: Captured) -> None:
    assert ask(capsys, "pull", seeing, "--no-vision")[0] == 0
    assert listed(capsys).keys() == {seeing}
    hub.models["org/other"] = {"q4.gguf": b"GGUF" * 1000, **TOWERS}
    hub.architectures["org/other"] = "llama"  # which sees nothing here
    assert ask(capsys, "pull", "org/other:q4.gguf")[0] == 0
    assert listed(capsys).keys() == {seeing, "org/other:q4.gguf"}
    hub.architectures["org/other"] = "gemma4"
    assert ask(capsys, "pull", "org/other:q4.gguf")[0] == 0
    assert "org/other:mmproj-BF16.gguf" in listed(capsys)


def test_of_several_towers_none_is_fetched(hub: FakeHub, capsys: Captured) -> None:
    names = ("mmproj-31B-F16.gguf", "mmproj-26B-F16.gguf")
    hub.models[SEEING] = {"q4.gguf": b"GGUF" * 1000, **dict.fromkeys(names, b"GGUF")}
    code, _, err = ask(capsys, "pull", f"{SEEING}:q4.gguf")
    assert code == 0 and listed(capsys).keys() == {f"{SEEING}:q4.gguf"}
    assert "q4.gguf has 2 mmproj files beside it, so none is fetched for its pictures" in err
    assert all(f"{SEEING}:{name}" in err for name in names)
    ask(capsys, "pull", f"{SEEING}:{names[0]}")  # itself a file that can be named
    assert listed(capsys).keys() == {f"{SEEING}:q4.gguf", f"{SEEING}:{names[0]}"}


def test_room_is_needed_for_both(
    hub: FakeHub, seeing: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=4100)  # enough for the model alone
    monkeypatch.setattr(meter.shutil, "disk_usage", lambda _: free)
    code, _, err = ask(capsys, "pull", seeing)
    assert code == 2 and f"no room for {seeing} and {SEEING}:mmproj-BF16.gguf" in err
    assert listed(capsys) == {} and ask(capsys, "pull", seeing, "--no-vision")[0] == 0


# -- list --------------------------------------------------------------------------------------


def test_a_list_of_nothing(hub: FakeHub, capsys: Captured) -> None:
    assert ask(capsys, "list") == (
        0,
        "No models are here yet; `flashdraft pull MODEL` fetches one.\n",
        "",
    )
    assert listed(capsys) == {}


def test_what_is_here_and_when_it_was_used(hub: FakeHub, capsys: Captured) -> None:
    ask(capsys, "pull", TARGET)
    hub.add("org/files", **{"q4.gguf": b"GGUF" * 1000, "q8.gguf": b"GGUF" * 2000})
    sources.resolve_source("org/files:q4.gguf")
    rows = listed(capsys)
    assert rows.keys() == {TARGET, DRAFTER, "org/files:q4.gguf"}
    assert rows[TARGET]["drafter"] == DRAFTER and rows[DRAFTER]["drafts_for"] == [TARGET]
    assert rows[TARGET]["fetched"] and rows[TARGET]["used"] is None
    file = rows["org/files:q4.gguf"]
    assert file["used"] and file["num_bytes"] == 4000 and file["is_whole"]
    assert 78_000 < rows[TARGET]["num_bytes"] < 80_000
    code, out, _ = ask(capsys, "list")
    head, first, *_ = out.splitlines()
    assert code == 0 and head.split() == ["MODEL", "SIZE", "STATE", "FETCHED", "USED", "DRAFTER"]
    assert re.fullmatch(r"3 models, 16\d kB", out.splitlines()[-1])
    assert DRAFTER in first and "whole" in first


def test_an_unfinished_fetch_is_listed(hub: FakeHub, capsys: Captured) -> None:
    hub.cuts = [20_000] + [0] * 5
    assert ask(capsys, "pull", NAME)[0] == 2
    row = listed(capsys)[NAME]
    assert not row["is_whole"] and row["fetched"] is None and row["num_bytes"] >= 20_000
    assert "unfinished" in ask(capsys, "list")[1]
    assert ask(capsys, "rm", NAME)[0] == 0
    assert listed(capsys) == {} and not HubFolder(NAME).path.exists()


def test_a_target_is_here_though_its_drafter_failed(hub: FakeHub, capsys: Captured) -> None:
    hub.models[DRAFTER] = {"config.json": b"{}", "model.safetensors": b"w" * 50}
    hub.refusals[DRAFTER] = 403, {"X-Error-Code": "GatedRepo"}
    assert ask(capsys, "pull", TARGET)[0] == 2
    rows = listed(capsys)
    assert rows[TARGET]["is_whole"] and rows[TARGET]["fetched"]
    assert HubFolder(TARGET).find() is not None
    assert ask(capsys, "rm", TARGET)[0] == 0
    assert not HubFolder(TARGET).path.exists()


def test_whole_blobs_without_names_are_unfinished(hub: FakeHub, capsys: Captured) -> None:
    sources.resolve_source(NAME)
    (HubFolder(NAME).path / "refs" / "main").unlink()  # as if it was killed before the end
    row = listed(capsys)[NAME]
    assert not row["is_whole"] and row["num_bytes"] > 77_000
    assert ask(capsys, "rm", NAME)[0] == 0
    assert not HubFolder(NAME).path.exists()


def test_what_other_programs_fetched_is_not_ours(hub: FakeHub, capsys: Captured) -> None:
    for name in (NAME, TARGET):
        sources.resolve_source(name)
        (HubFolder(name).path / "flashdraft.json").unlink()
    assert listed(capsys).keys() == {TARGET}  # which is known by name
    code, _, err = ask(capsys, "rm", NAME)
    assert code == 2 and "flashdraft neither fetched nor used it" in err and "hf cache rm" in err
    assert HubFolder(NAME).find() is not None


@pytest.mark.parametrize("note", ["", "[]", '{"models": {"../../x": {}}}', '{"models": {"a": 1}}'])
def test_a_note_that_is_damaged(hub: FakeHub, capsys: Captured, note: str) -> None:
    sources.resolve_source(NAME)
    (HubFolder(NAME).path / "flashdraft.json").write_text(note)
    assert listed(capsys) == {}
    sources.resolve_source(NAME)
    assert listed(capsys).keys() == {NAME}


# -- rm ----------------------------------------------------------------------------------------


def test_what_is_removed_and_freed(hub: FakeHub, capsys: Captured) -> None:
    ask(capsys, "pull", TARGET)
    code, out, _ = ask(capsys, "rm", TARGET)
    assert code == 0 and re.fullmatch(rf"Removed {TARGET}: 7\d kB freed\.\n", out)
    assert not HubFolder(TARGET).path.exists() and HubFolder(DRAFTER).find() is not None
    code, out, _ = ask(capsys, "rm", DRAFTER, "--json")
    content = json.loads(out)
    assert content["removed"] == [{"name": DRAFTER, "num_bytes": content["num_bytes"]}]
    assert listed(capsys) == {}
    assert ask(capsys, "pull", TARGET)[0] == 0  # and it can be had again


def test_one_file_of_several(hub: FakeHub, capsys: Captured) -> None:
    hub.add("org/files", **{"q4.gguf": b"GGUF" * 1000, "q8.gguf": b"GGUF" * 2000})
    for file in ("q4", "q8"):
        sources.resolve_source(f"org/files:{file}.gguf")
    assert ask(capsys, "rm", "org/files:q4.gguf")[1] == "Removed org/files:q4.gguf: 4 kB freed.\n"
    assert listed(capsys).keys() == {"org/files:q8.gguf"}
    assert ask(capsys, "rm", "org/files:q8.gguf")[0] == 0
    assert not HubFolder("org/files").path.exists()


def test_an_unfinished_file_goes_without_its_siblings(hub: FakeHub, capsys: Captured) -> None:
    hub.add("org/files", **{"q4.gguf": b"GGUF" * 1000, "q8.gguf": b"GGUF" * 2000})
    assert ask(capsys, "pull", "org/files:q4.gguf")[0] == 0
    hub.cuts = [3000] + [0] * 5
    assert ask(capsys, "pull", "org/files:q8.gguf")[0] == 2
    rows = listed(capsys)
    assert rows["org/files:q4.gguf"]["num_bytes"] == 4000 and rows["org/files:q4.gguf"]["is_whole"]
    assert rows["org/files:q8.gguf"]["num_bytes"] == 3000
    assert not rows["org/files:q8.gguf"]["is_whole"]
    assert ask(capsys, "rm", "org/files:q8.gguf")[1] == "Removed org/files:q8.gguf: 3 kB freed.\n"
    assert listed(capsys).keys() == {"org/files:q4.gguf"}
    assert HubFolder("org/files").find("q4.gguf") is not None
    assert len([*HubFolder("org/files").path.glob("blobs/*")]) == 1


def test_a_file_begun_alone_takes_its_folder_along(hub: FakeHub, capsys: Captured) -> None:
    hub.add("org/files", **{"q8.gguf": b"GGUF" * 2000})
    hub.cuts = [3000] + [0] * 5
    assert ask(capsys, "pull", "org/files:q8.gguf")[0] == 2
    assert ask(capsys, "rm", "org/files:q8.gguf")[0] == 0
    assert not HubFolder("org/files").path.exists()


def test_content_that_another_file_shows_stays(hub: FakeHub, capsys: Captured) -> None:
    hub.add("org/files", **{"q4.gguf": b"GGUF" * 1000, "same.gguf": b"GGUF" * 1000})
    for file in ("q4", "same"):
        sources.resolve_source(f"org/files:{file}.gguf")
    assert "0 bytes freed" in ask(capsys, "rm", "org/files:q4.gguf")[1]
    path = HubFolder("org/files").find("same.gguf")
    assert path is not None and path.read_bytes() == b"GGUF" * 1000
    assert "4 kB freed" in ask(capsys, "rm", "org/files:same.gguf")[1]
    assert not HubFolder("org/files").path.exists()


@pytest.mark.parametrize("blobs", [["../../../mine"], ["*"], 5, [1], None])
def test_a_note_of_blobs_that_lead_out(
    hub: FakeHub, capsys: Captured, tmp_path: Path, blobs: Any
) -> None:
    hub.add("org/files", **{"q4.gguf": b"GGUF" * 1000, "q8.gguf": b"GGUF" * 2000})
    for file in ("q4", "q8"):
        sources.resolve_source(f"org/files:{file}.gguf")
    (tmp_path / "mine").write_text("keep")
    note = HubFolder("org/files").path / "flashdraft.json"
    content = json.loads(note.read_text())
    content["models"]["org/files:q4.gguf"]["blobs"] = blobs
    note.write_text(json.dumps(content))
    assert ask(capsys, "rm", "org/files:q4.gguf")[0] == 0
    assert (tmp_path / "mine").exists() and HubFolder("org/files").find("q8.gguf") is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("*", "is a pattern"),
        ("org/*", "is a pattern"),
        ("org/nam[e]", "is a pattern"),
        ("..", "is no model's name"),
        ("../hub", "is no model's name"),
        ("org/..", "is no model's name"),
        ("./org/name", "is no model's name"),
        ("~/models", "is no model's name"),
        ("a/b/c", "is no model's name"),
        ("", "is no model's name"),
        ("{cache}", "is no model's name"),
        ("org/nme", "There is no 'org/nme' in the cache.*Did you mean org/name?"),
        ("smollm2-135m", "There is no 'smollm2-135m' in the cache"),
    ],
)
def test_only_names_are_removed(
    hub: FakeHub, capsys: Captured, tmp_path: Path, name: str, words: str
) -> None:
    sources.resolve_source(NAME)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = ask(capsys, "rm", NAME, name.format(cache=tmp_path / "hub"))
    first, _, second = words.partition(".*")
    assert (code, out) == (2, "") and first in err and second in err
    assert "`flashdraft list` has the names" in err
    assert sorted(tmp_path.rglob("*")) == before  # all or none


def test_links_that_lead_out_are_left_alone(hub: FakeHub, capsys: Captured, tmp_path: Path) -> None:
    sources.resolve_source(NAME)
    folder = HubFolder(NAME).path
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    code, _, err = ask(capsys, "rm", NAME)
    assert code == 2 and "is a link" in err and "nothing was removed" in err
    assert (tmp_path / "elsewhere" / "snapshots" / COMMIT / "config.json").is_file()


def test_links_inside_do_not_take_what_they_lead_to(
    hub: FakeHub, capsys: Captured, tmp_path: Path
) -> None:
    sources.resolve_source(NAME)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    (HubFolder(NAME).path / "blobs" / "link").symlink_to(tmp_path / "mine")
    assert ask(capsys, "rm", NAME)[0] == 0
    assert (tmp_path / "mine" / "file").read_text() == "keep"


@pytest.mark.parametrize("lock", ["flashdraft.lock", "abc.lock"])  # ours, and the client's
def test_not_while_it_is_fetched(hub: FakeHub, capsys: Captured, lock: str) -> None:
    sources.resolve_source(NAME)
    with locks.held(HubFolder(NAME).locks / lock, lambda: None):
        code, _, err = ask(capsys, "rm", NAME)
    assert code == 2 and "org/name is being fetched by another process" in err
    assert HubFolder(NAME).find() is not None
    assert ask(capsys, "rm", NAME)[0] == 0


@pytest.mark.parametrize("lock", ["flashdraft.lock", "abc.lock"])
def test_all_or_none_where_one_is_fetched(hub: FakeHub, capsys: Captured, lock: str) -> None:
    for name in (NAME, TARGET):
        sources.resolve_source(name)
    with locks.held(HubFolder(TARGET).locks / lock, lambda: None):
        code, out, err = ask(capsys, "rm", NAME, TARGET)
    assert (code, out) == (2, "") and f"{TARGET} is being fetched" in err
    assert HubFolder(NAME).find() is not None and HubFolder(TARGET).find() is not None
    assert ask(capsys, "rm", NAME, TARGET)[0] == 0


def test_all_or_none_where_one_is_a_link(hub: FakeHub, capsys: Captured, tmp_path: Path) -> None:
    for name in (NAME, TARGET):
        sources.resolve_source(name)
    HubFolder(TARGET).path.rename(tmp_path / "elsewhere")
    HubFolder(TARGET).path.symlink_to(tmp_path / "elsewhere")
    code, out, err = ask(capsys, "rm", NAME, TARGET)
    assert (code, out) == (2, "") and "nothing was removed" in err
    assert HubFolder(NAME).find() is not None


@pytest.mark.parametrize("is_first", [False, True])
def test_a_model_named_twice_and_by_its_repository(
    hub: FakeHub, capsys: Captured, is_first: bool
) -> None:
    hub.add("org/files", **{"q4.gguf": b"GGUF" * 1000})
    for name in ("org/files", "org/files:q4.gguf"):
        sources.resolve_source(name)
    names = ["org/files", "org/files:q4.gguf", "org/files"]
    code, out, _ = ask(capsys, "rm", *names[is_first:])
    assert code == 0 and len(out.splitlines()) == 2 and "org/files:q4.gguf: 4 kB freed" in out
    assert listed(capsys) == {} and not HubFolder("org/files").path.exists()


def test_a_repository_of_which_files_are_here(hub: FakeHub, capsys: Captured) -> None:
    hub.add("org/files", **{"q4.gguf": b"GGUF" * 1000})
    sources.resolve_source("org/files:q4.gguf")
    code, _, err = ask(capsys, "rm", "org/files")
    assert code == 2 and "removed by their names: org/files:q4.gguf" in err


def test_what_cannot_be_removed_says_what_was(
    hub: FakeHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (NAME, TARGET):
        sources.resolve_source(name)
    remove = HubFolder.remove

    def refuse(folder: HubFolder, name: str, file: str) -> int:
        if name == TARGET:
            raise PermissionError(13, "Permission denied")
        return remove(folder, name, file)

    monkeypatch.setattr(HubFolder, "remove", refuse)
    code, _, err = ask(capsys, "rm", NAME, TARGET)
    assert code == 2 and f"{TARGET} cannot be removed" in err and f"before it: {NAME}." in err


def test_packaged_models_and_exports(
    hub: FakeHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PackagedModel("test-package", "1", "x/tiny.gguf", "0" * 64, 4, "GGUF Q4_0")
    monkeypatch.setitem(sources._PACKAGED, "smollm2-135m", model)
    exported = cache_folder() / "exported" / "tiny-float32"
    exported.mkdir(parents=True)
    (exported / "exported_from.json").write_text("{}")
    model.path.write_bytes(b"GGUF")
    rows = listed(capsys)
    assert rows["smollm2-135m"]["num_bytes"] == 4 and rows["tiny-float32"]["source"] == "export"
    with locks.held(model.lock, lambda: None):
        assert "being fetched" in ask(capsys, "rm", "smollm2-135m")[2]
    assert ask(capsys, "rm", "smollm2-135m", "tiny-float32")[0] == 0
    assert listed(capsys) == {} and not model.path.exists() and not exported.exists()


def test_room_for_a_packaged_model(
    hub: FakeHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**8))
    code, _, err = ask(capsys, "pull", "smollm2-135m")
    assert code == 2 and "takes 197 MB, 100 MB are free in" in err
    assert "so 97 MB are missing" in err and "FLASHDRAFT_HOME" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
def test_what_may_not_be_removed(hub: FakeHub, capsys: Captured) -> None:
    sources.resolve_source(NAME)
    cache = Path(constants.HF_HUB_CACHE)
    cache.chmod(0o500)
    code, _, err = ask(capsys, "rm", NAME)
    cache.chmod(0o700)
    assert code == 2 and "cannot be removed" in err
