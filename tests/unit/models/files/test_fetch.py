"""Models fetched from a Hub of the tests' own: what comes, goes on, is checked, is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from flashdraft.errors import CapacityError, CheckpointError, ModelNotFoundError
from flashdraft.models.files import hub as hub_module
from flashdraft.models.files import locks, meter, transfer
from flashdraft.models.files.hub import HubModel, bytes_on_disk, fetch_from_hub
from flashdraft.models.files.hub_cache import HubFolder
from tests.hub import COMMIT, INDEX, FakeHub, hub_in_use

NAME = "org/name"
TOKEN = "hf_secret"
SHARD = "model-1.safetensors"
NEEDED = {"config.json", "tokenizer.json", INDEX, SHARD, "model-2.safetensors"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(transfer, "_WAITS_S", (0.0, 0.0))
    with hub_in_use(monkeypatch, tmp_path) as hub:
        hub.add(NAME)
        yield hub


def fetch(name: str = NAME, file: str = "") -> Path:
    return fetch_from_hub(HubModel(name, file))[0]


def refused(kind: type[Exception] = ModelNotFoundError, name: str = NAME, file: str = "") -> str:
    with pytest.raises(kind) as caught:
        fetch(name, file)
    assert TOKEN not in str(caught.value)
    return str(caught.value)


def parts() -> list[Path]:
    return [*HubFolder(NAME).path.glob("blobs/*.incomplete")]


def leave_part(content: bytes) -> None:
    """What an earlier fetch of the first shard left."""
    whole = bytes(range(256)) * 300
    blobs = HubFolder(NAME).path / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(whole).hexdigest() + ".flashdraft.incomplete"
    (blobs / name).write_bytes(content)


# -- what comes --------------------------------------------------------------------------------


def test_what_is_needed_comes_and_nothing_else(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch()
    assert {path.name for path in folder.iterdir()} == NEEDED
    for path in folder.iterdir():
        assert path.read_bytes() == hub.models[NAME][path.name]
        assert path.is_symlink() and path.resolve().parent == HubFolder(NAME).path / "blobs"
    said = capsys.readouterr().err
    assert re.search(r"Fetching org/name: 78 kB in 5 files", said)
    assert "Its licence is gemma: https://huggingface.co/org/name" in said
    assert re.search(r"Fetched org/name: 78 kB in \d+ s\.", said) and "\x1b" not in said
    assert not parts()


def test_the_cache_is_that_of_the_client(hub: FakeHub) -> None:
    folder = fetch()
    found = huggingface_hub.snapshot_download(NAME, allow_patterns=sorted(NEEDED))
    assert Path(found) == folder
    assert huggingface_hub.hf_hub_download(NAME, SHARD) == str(folder / SHARD)
    (repository,) = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
    assert repository.repo_id == NAME


def test_what_is_there_is_not_fetched_again(hub: FakeHub) -> None:
    folder = fetch()
    hub.asked.clear()
    assert fetch() == folder
    assert [path for _, path, _ in hub.asked] == [f"/api/models/{NAME}"]


def test_what_other_programs_fetched_is_used(hub: FakeHub) -> None:
    huggingface_hub.snapshot_download(NAME)
    hub.asked.clear()
    fetch()
    assert len(hub.asked) == 1


def test_of_a_new_version_only_what_changed(hub: FakeHub) -> None:
    fetch()
    hub.commits[NAME] = "d" * 40
    hub.models[NAME]["tokenizer.json"] = b'{"new": 1}'
    hub.asked.clear()
    folder = fetch()
    assert folder.name == "d" * 40 and (folder / "tokenizer.json").read_bytes() == b'{"new": 1}'
    assert not hub.weights_asked()


def test_without_an_index_the_one_file(hub: FakeHub) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"w" * 50, "other.safetensors": b"o"}
    hub.models["org/one"] = files
    assert {path.name for path in fetch("org/one").iterdir()} == {*files} - {"other.safetensors"}


def test_one_gguf_file(hub: FakeHub) -> None:
    hub.add("org/gguf", **{"sub/q4.gguf": b"GGUF" * 100, "q8.gguf": b"GGUF8"})
    path = fetch("org/gguf", "sub/q4.gguf")
    assert path.read_bytes() == b"GGUF" * 100
    assert path.parent.parent.name == COMMIT
    assert len([*HubFolder("org/gguf").path.glob("blobs/*")]) == 1


def relist(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Have each file listed otherwise."""
    listing = hub.listing

    def changed(repository: str) -> bytes:
        content = json.loads(listing(repository))
        for one in content["siblings"]:
            change(one)
        return json.dumps(content).encode()

    monkeypatch.setattr(hub, "listing", changed)


def test_a_file_without_a_digest_is_judged_by_its_size(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(one: Any) -> None:
        one.pop("lfs", None)
        one["blobId"] = None

    relist(hub, monkeypatch, without)
    folder = fetch()
    assert (folder / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert (folder / SHARD).resolve().name.startswith("unchecked-")
    said = capsys.readouterr().err
    assert said.count("Warning") == 1
    assert "lists no digest of config.json and 4 others; only sizes are checked" in said


@pytest.mark.parametrize("name", [INDEX, SHARD])
@pytest.mark.parametrize(("size", "words"), [(None, "lists no size of"), (-5, "lists -5 as the")])
def test_a_file_without_a_size_is_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str, size: int | None, words: str
) -> None:
    def without(one: Any) -> None:
        if one["rfilename"] in (name, "README.md"):  # which nobody reads
            one["size"] = size
            if "lfs" in one:
                one["lfs"]["size"] = size

    relist(hub, monkeypatch, without)
    said = refused()
    assert words in said and f"of {NAME}/{name}, so what comes could not be checked" in said
    assert HubFolder(NAME).find() is None and not hub.weights_asked()


@pytest.mark.parametrize("digest", ["", "x" * 64, "A" * 64, "../" * 10, "0" * 63, "0" * 40, "None"])
def test_a_digest_that_is_none_is_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    def odd(one: Any) -> None:
        if "lfs" in one:
            one["lfs"]["sha256"] = digest

    relist(hub, monkeypatch, odd)
    assert f"as the digest of {NAME}/{SHARD}, so what comes could not" in refused()
    assert not hub.weights_asked()


def test_a_small_file_has_the_digest_of_git(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    relist(hub, monkeypatch, lambda one: one.update(blobId="0" * 64))
    assert "as the digest of" in refused()


def test_files_over_the_limit_of_http_are_left_to_the_client(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    download = huggingface_hub.hf_hub_download

    def through_client(repository: str, name: str, revision: str) -> str:
        asked.append(name)
        monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 10**9)
        return download(repository, name, revision=revision)

    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 50_000)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", through_client)
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert asked == [SHARD]


def test_the_client_is_interrupted_as_we_are(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = []

    def interrupted(*_: Any, **__: Any) -> str:
        threads.append(threading.current_thread())
        raise KeyboardInterrupt

    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 50_000)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch()
    assert threads == [threading.main_thread()]  # no other hears of a signal
    assert "Interrupted; 897 bytes of 78 kB of org/name are kept" in capsys.readouterr().err


# -- going on, and what is wrong ---------------------------------------------------------------


def test_a_part_is_continued(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    leave_part(hub.models[NAME][SHARD][:50_000])
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert hub.weights_asked() == ["bytes=50000-"] and not parts()
    assert "78 kB in 5 files, 50 kB of it here already" in capsys.readouterr().err


def test_a_whole_part_is_only_checked(hub: FakeHub) -> None:
    leave_part(hub.models[NAME][SHARD])
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert hub.weights_asked() == []


@pytest.mark.parametrize("way", ["ignores_range", "wrong_range"])
def test_a_server_that_does_not_continue(hub: FakeHub, way: str) -> None:
    setattr(hub, way, True)
    leave_part(hub.models[NAME][SHARD][:50_000])
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert hub.weights_asked()[0] == "bytes=50000-"


@pytest.mark.parametrize("part", [b"x" * 50_000, b"x" * 100_000, b"x" * 76_800])
def test_a_part_of_something_else_is_fetched_anew(hub: FakeHub, part: bytes) -> None:
    leave_part(part)
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert hub.weights_asked()[-1] is None


def test_a_connection_that_breaks_is_taken_up_again(hub: FakeHub) -> None:
    hub.cuts = [20_000, 10_000]
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert hub.weights_asked() == [None, "bytes=20000-", "bytes=30000-"]


@pytest.mark.parametrize("way", ["ignores_range", "wrong_range", "refuses_range"])
@pytest.mark.parametrize("step", [0, 100])
def test_a_server_that_never_continues_is_given_up(hub: FakeHub, way: str, step: int) -> None:
    setattr(hub, way, True)
    hub.cuts = [20_000 + step * number for number in range(200)]
    said = refused()
    assert "connection to the Hugging Face Hub was lost, with 20 kB of 77 kB of" in said
    assert len(hub.weights_asked()) < 10 and parts()[0].stat().st_size >= 20_000
    hub.cuts = []
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]


def test_what_comes_again_is_no_progress(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_MAX_RESTARTS", 1000)
    hub.ignores_range = True
    hub.cuts = [20_000] * 200
    refused()
    assert len(hub.weights_asked()) < 10


def test_a_server_out_of_order_is_asked_again(hub: FakeHub) -> None:
    hub.statuses = [503, 502]
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]


def test_a_connection_that_is_lost_keeps_the_part(hub: FakeHub) -> None:
    hub.cuts = [20_000] + [0] * 10
    said = refused()
    assert "connection to the Hugging Face Hub was lost, with 20 kB of 77 kB of" in said
    assert "What came is kept: the same command goes on from there." in said
    (part,) = parts()
    assert part.stat().st_size == 20_000
    hub.cuts, hub.asked = [], []
    fetch()
    assert hub.weights_asked() == ["bytes=20000-"]


def test_damage_is_fetched_again_and_then_refused(hub: FakeHub) -> None:
    hub.damage = [b"wrong"]
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]
    hub.models[NAME][SHARD] = b"another" * 100
    hub.damage = [b"wrong", b"wrong"]
    said = refused(CheckpointError)
    assert re.search(rf"org/name/{SHARD} came damaged, twice: it has sha256:\w+, the Hub has", said)
    assert "Nothing of it was kept" in said and not parts()


def test_more_than_was_listed_is_refused(hub: FakeHub) -> None:
    hub.wrong_sizes[SHARD] = 1000
    assert "more than the 1000 bytes that the Hub says it has" in refused(CheckpointError)
    assert not parts()


def test_names_that_lead_out_are_refused(hub: FakeHub) -> None:
    hub.models[NAME]["../../x.json"] = b"{}"
    assert "'../../x.json', which may lead out of its folder; nothing was" in refused()
    assert not HubFolder(NAME).path.exists()


def test_an_index_that_names_what_is_not_there(hub: FakeHub) -> None:
    del hub.models[NAME]["model-2.safetensors"]
    assert "names 'model-2.safetensors', which the Hub does not have" in refused(CheckpointError)


def test_an_answer_of_no_hub(hub: FakeHub) -> None:
    hub.commits[NAME] = "../main"
    assert "names '../main' as the commit" in refused()


# -- room --------------------------------------------------------------------------------------


def test_room_is_looked_for_before(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(meter.shutil, "disk_usage", lambda _: SimpleNamespace(free=30_000))
    said = refused(CapacityError)
    assert f"no room for {NAME}: fetching takes 78 kB, 30 kB are free in {tmp_path}" in said
    assert "so 48 kB are missing" in said and "`flashdraft rm`" in said and "HF_HOME" in said
    assert not hub.weights_asked()
    leave_part(hub.models[NAME][SHARD][:60_000])  # what is here already needs none
    fetch()


def test_room_is_for_both_of_a_pair(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/draft")
    monkeypatch.setattr(meter.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(
        CapacityError, match="room for org/name and org/draft: fetching takes 155 kB"
    ):
        fetch_from_hub(HubModel(NAME), HubModel("org/draft"))
    assert not hub.weights_asked()


def test_a_disk_that_fills_up_keeps_the_part(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer._Part, "append", full)
    said = refused()
    assert "cannot be stored in" in said and "No space left" in said and "HF_HOME" in said


# -- who may -----------------------------------------------------------------------------------


def test_the_token_stays_with_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch()
    hosts = {host: set() for host in ("hub", "cdn")}
    for host, _, headers in hub.asked:
        hosts[host].add(headers.get("authorization"))
    assert hosts == {"hub": {f"Bearer {TOKEN}"}, "cdn": {None}}


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_names_licence_and_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    hub.refusals[NAME] = status, {"X-Error-Code": "GatedRepo"}
    assert refused() == (
        "org/name is gated: accept its licence at https://huggingface.co/org/name and set HF_TOKEN "
        "to a token of that account."
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "token in HF_TOKEN" in refused() and not parts()


def test_no_such_model_and_no_such_file(hub: FakeHub) -> None:
    assert "There is no model 'org/other' on the Hugging Face Hub" in refused(name="org/other")
    hub.models[NAME]["q4_0.gguf"] = b"GGUF"
    said = refused(file="q4_1.gguf")
    assert "has no file 'q4_1.gguf'. Did you mean q4_0.gguf?" in said


def test_no_network(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    capsys.readouterr()
    assert fetch() == folder  # what is whole is used
    assert capsys.readouterr().err == (
        "Nothing new is known of org/name: the Hugging Face Hub cannot be reached. The stored "
        "commit cccccccccccc is used.\n"
    )
    (folder / SHARD).unlink()
    assert "not on this machine and the Hugging Face Hub cannot be reached" in refused()
    assert bytes_on_disk(NAME) is None


def test_offline_is_quiet_where_it_was_asked_for(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch()
    capsys.readouterr()

    def offline(*_: Any, **__: Any) -> Any:
        raise hub_errors.OfflineModeIsEnabled("as HF_HUB_OFFLINE=1 does")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    assert fetch() == folder
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_a_hub_that_refuses_does_not_keep_from_what_is_there(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    folder = fetch()
    hub.add("org/files", **{"q4.gguf": b"GGUF"})
    file = fetch("org/files", "q4.gguf")
    capsys.readouterr()
    hub.listing_refusal = status, {}
    assert fetch() == folder
    assert fetch("org/files", "q4.gguf") == file
    first, second = capsys.readouterr().err.splitlines()
    assert f"of org/name: the Hugging Face Hub answered with status {status}. The" in first
    assert "org/files:q4.gguf" in second and "stored commit cccccccccccc is used." in second


def test_a_hub_out_of_order_has_its_status_told(hub: FakeHub) -> None:
    hub.listing_refusal = 503, {}
    assert "(status 503)" in refused(name="org/other")


# -- together, and interrupted -----------------------------------------------------------------


@pytest.fixture
def is_waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a fetch says that it waits for another process."""
    event = threading.Event()

    def hear(text: str) -> None:
        if text.startswith("Another process fetches org/name or removes it; waiting"):
            event.set()

    monkeypatch.setattr(hub_module, "say", hear)
    return event


def test_two_at_once_fetch_once(hub: FakeHub, is_waiting: threading.Event) -> None:
    hub.hold = threading.Event()
    found: list[Path] = []
    both = [threading.Thread(target=lambda: found.append(fetch())) for _ in range(2)]
    both[0].start()
    assert hub.is_holding.wait(30)
    both[1].start()
    assert is_waiting.wait(30)
    hub.hold.set()
    for one in both:
        one.join(30)
    assert found[0] == found[1] and len(hub.weights_asked()) == 1
    assert (found[0] / SHARD).read_bytes() == hub.models[NAME][SHARD]
    assert not locks.is_held(HubFolder(NAME).lock)


def test_a_fetch_that_waited_for_a_removal(hub: FakeHub, is_waiting: threading.Event) -> None:
    fetch()
    hub.commits[NAME] = "d" * 40
    hub.models[NAME]["tokenizer.json"] = b'{"new": 1}'
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(fetch()))
    with locks.held(HubFolder(NAME).lock, lambda: None):
        waiting.start()
        assert is_waiting.wait(30)
        HubFolder(NAME).remove(NAME)
    waiting.join(30)
    assert {path.name for path in found[0].iterdir()} == NEEDED
    assert (found[0] / SHARD).read_bytes() == hub.models[NAME][SHARD]


def test_an_interrupted_fetch_says_how_to_go_on(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.hold = threading.Event()

    def interrupted(*_: Any, **__: Any) -> Any:
        assert hub.is_holding.wait(30)
        while not parts() or parts()[0].stat().st_size == 0:
            parts()
        hub.hold.set()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_BLOCK_BYTES", 1)
        patch.setattr(hub_module, "wait", interrupted)
        patch.setattr(transfer._Part, "append", flushed(transfer._Part.append))
        with pytest.raises(KeyboardInterrupt):
            _without_index(hub)
    said = capsys.readouterr().err
    assert re.search(r"Interrupted; \d+ kB of 78 kB of org/name are kept\. The same command", said)
    hub.hold = None
    assert (fetch() / SHARD).read_bytes() == hub.models[NAME][SHARD]


def flushed(append: Any) -> Any:
    """What is written is seen at once."""

    def write(part: Any, block: bytes) -> None:
        append(part, block)
        part._file.flush()

    return write


def _without_index(hub: FakeHub) -> None:
    """The index, which comes by itself before, is there already."""
    folder, content = HubFolder(NAME), hub.models[NAME][INDEX]
    snapshot = folder.path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / INDEX).write_bytes(content)
    fetch()


# -- how far it is -----------------------------------------------------------------------------


def test_a_terminal_has_one_line_and_a_file_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(meter.time, "monotonic", lambda: next(clock))
    counted = meter.FetchMeter("org/name", 10_000_000_000, 1_000_000_000)
    for _ in range(6):
        counted.add(500_000_000)
    counted.close()
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3 and all("org/name: " in line for line in lines)
    assert re.fullmatch(
        r"org/name: 2\.\d GB of 10\.0 GB \(2\d%\), \d+ MB/s, \d+ (s|min) left", lines[0]
    )
    monkeypatch.setattr(meter.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    counted = meter.FetchMeter("org/name", 10_000_000_000)
    counted.add(500_000_000)
    counted.close()
    assert re.fullmatch(r"\r\x1b\[Korg/name: 500 MB of .*\r\x1b\[K", capsys.readouterr().err)


def test_sizes_in_words() -> None:
    found = [meter.in_words(n) for n in (0, 999, 1000, 98_362_432, 62_540_000_000)]
    assert found == ["0 bytes", "999 bytes", "1 kB", "98 MB", "62.5 GB"]


def test_a_cache_that_cannot_be_written(hub: FakeHub, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "hub", ignore_errors=True)
    (tmp_path / "hub").write_text("a file")
    assert "cannot be stored in" in refused()
