"""Models from the Hugging Face Hub: what is missing is fetched into the cache of the Hub's client.

Only files that are read are fetched, and only where there is room for them. HF_TOKEN, HF_HOME,
HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to the client. Why something cannot be had is
said by refusals.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from flashdraft.core import VERSION
from flashdraft.errors import CheckpointError, ModelNotFoundError, did_you_mean, quoted
from flashdraft.models.files import hub_cache, locks
from flashdraft.models.files.digests import GIT, SHA256, parse_digest
from flashdraft.models.files.hub_cache import HubFile, HubFolder
from flashdraft.models.files.meter import FetchMeter, check_room, in_words, say
from flashdraft.models.files.mmproj import ARCHITECTURES, beside, one_of_each
from flashdraft.models.files.opening import MAX_JSON_BYTES
from flashdraft.models.files.refusals import explain, explain_briefly, is_unreachable, licence_page
from flashdraft.models.files.safetensors import INDEX_NAME
from flashdraft.models.files.split import first_part, part_names
from flashdraft.models.files.transfer import Listener, Stopped, Wanted, fetch_file

_WORKERS = 4  # files at a time
_LISTING_S = 15.0
_GO_ON = "What came is kept: the same command goes on from there."


@dataclass(frozen=True)
class HubModel:
    """A repository, or one GGUF file of it, or the first of those that one is split into."""

    repository: str
    file: str = ""

    @property
    def name(self) -> str:
        """As the user names it."""
        return f"{self.repository}:{self.file}" if self.file else self.repository


@dataclass(frozen=True)
class _Plan:
    """What of a model has to be there."""

    model: HubModel
    commit: str
    files: tuple[HubFile, ...]
    licence: str | None = None
    mmproj: tuple[HubFile, ...] = ()  # what a GGUF model may see with: a file of its own

    @property
    def folder(self) -> HubFolder:
        return HubFolder(self.model.repository)

    @property
    def missing(self) -> list[HubFile]:
        return [file for file in self.files if not self.folder.has(self.commit, file)]

    @property
    def is_shown(self) -> bool:
        """Whether all of it is there, under its names."""
        return self.folder.shows(self.commit, self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def num_here(self) -> int:
        return sum(self.folder.num_here(self.commit, file) for file in self.files)

    @property
    def begun(self) -> list[str]:
        """The blobs by which a fetch of one file is known until a link shows them."""
        files = self.missing if self.model.file else []
        return [self.folder.blob(self.commit, file).name for file in files]

    @property
    def companion(self) -> _Plan | None:
        """What of the mmproj file has to be there; of several none is meant."""
        if len(self.mmproj) != 1:
            return None
        model = HubModel(self.model.repository, self.mmproj[0].name)
        return _Plan(model, self.commit, self.mmproj, self.licence)

    @property
    def path(self) -> Path:
        snapshot = self.folder.path / "snapshots" / self.commit
        return snapshot / self.model.file if self.model.file else snapshot


def fetch_from_hub(*models: HubModel, is_use: bool = True, with_mmproj: bool = False) -> list[Path]:
    """Where the models are; what is missing of them is fetched, after a look at the disk's room.

    Where the Hub cannot be asked, a model that is there is used as it is. With `with_mmproj` a GGUF
    file's mmproj file is fetched too, as a model of its own.
    """
    found = [_plan(model) for model in models]
    plans = [one for one in found if isinstance(one, _Plan)]
    if with_mmproj:
        plans += _companions(plans)
    missing = [one for one in plans if not one.is_shown]
    _check_room(missing)
    for plan in missing:
        _fetch(plan)
    for model in dict.fromkeys([*models, *(one.model for one in plans)]):
        HubFolder(model.repository).note_use(model.name, is_used=is_use)
    return [one.path if isinstance(one, _Plan) else one for one in found]


def bytes_on_disk(repository: str) -> int | None:
    """What the weights of a cached Hub model take; None where they are not all there."""
    folder = HubFolder(repository).find()
    if folder is None:
        return None
    return sum(file.stat().st_size for file in hub_cache.local_weights(folder))


def _companions(plans: Sequence[_Plan]) -> list[_Plan]:
    """What GGUF models see with; where that is not known, it is said how to name it."""
    for plan in plans:
        if len(plan.mmproj) > 1:
            names = [f"{plan.model.repository}:{file.name}" for file in plan.mmproj]
            say(
                f"{plan.model.name} has {len(names)} mmproj files beside it, so none is fetched "
                f"for its pictures. Name one by --mmproj: {', '.join(names)}."
            )
    return [one for plan in plans if (one := plan.companion) is not None]


# -- what is needed ----------------------------------------------------------------------------


def _plan(model: HubModel) -> _Plan | Path:
    """What is needed of a model, or where it is if the Hub does not say."""
    try:
        info = huggingface_hub.HfApi().model_info(
            model.repository, files_metadata=True, timeout=_LISTING_S
        )
    except Exception as error:  # the client's network errors have no common base of its own
        folder = HubFolder(model.repository)
        cached = folder.find(model.file)
        if cached is None:
            raise ModelNotFoundError(explain(model.repository, model.file, error)) from error
        if not isinstance(error, hub_errors.OfflineModeIsEnabled):  # which was asked for
            stored = cached.relative_to(folder.path / "snapshots").parts[0]
            say(
                f"Nothing new is known of {model.name}: the Hugging Face Hub "
                f"{explain_briefly(error)}. The stored commit {stored[:12]} is used."
            )
        return cached
    commit = info.sha
    if commit is None or not hub_cache.is_commit(commit):
        raise ModelNotFoundError(
            f"The Hub names {quoted(commit)} as the commit of {model.repository}, which is none: "
            "see whether HF_ENDPOINT, or a proxy, is a Hub."
        )
    listed = {_safe_name(model, one.rfilename): one for one in info.siblings or ()}
    licence = next((tag for tag in info.tags or () if tag.startswith("license:")), None)
    files = [_hub_file(model, listed[name]) for name in _chosen(model, commit, listed)]
    licence = licence and licence.removeprefix("license:")
    mmproj = []
    if (info.gguf or {}).get("architecture") in (None, *ARCHITECTURES):
        mmproj = [
            _hub_file(model, listed[name]) for name in one_of_each(beside(model.file, listed))
        ]
    return _Plan(model, commit, tuple(files), licence, tuple(mmproj))


def _safe_name(model: HubModel, name: object) -> str:
    parts = PurePosixPath(str(name)).parts
    if not parts or parts[0] == "/" or ".." in parts or not str(name).isprintable():
        raise ModelNotFoundError(
            f"{model.repository} has a file named {quoted(name)}, which may lead out of its "
            "folder; nothing was fetched."
        )
    return str(name)


def _hub_file(model: HubModel, listed: Any) -> HubFile:
    """A file by whose listed size and digest it will be judged; one without a size is refused."""
    name, lfs = listed.rfilename, listed.lfs
    size, given, kind = listed.size, listed.blob_id, GIT
    if lfs is not None:
        size, given, kind = lfs.size, lfs.sha256, SHA256
    if not isinstance(size, int) or size < 0:
        raise _odd_listing(model, name, "size", size)
    digest = None if given is None else parse_digest(str(given))
    if given is not None and (digest is None or digest.kind != kind):
        raise _odd_listing(model, name, "digest", given)
    return HubFile(name, size, digest)


def _odd_listing(model: HubModel, name: str, what: str, given: object) -> ModelNotFoundError:
    has = f"no {what}" if given is None else f"{quoted(given)} as the {what}"
    return ModelNotFoundError(
        f"The Hub lists {has} of {model.repository}/{name}, so what comes could not be checked; "
        "it was not fetched. See whether HF_ENDPOINT, or a proxy, is a Hub."
    )


def _chosen(model: HubModel, commit: str, listed: Mapping[str, Any]) -> list[str]:
    """The names of the files that are read; an index is fetched to know which these are."""
    ggufs = [name for name in listed if name.endswith(".gguf")]
    if model.file:
        if first := first_part(model.file):
            raise ModelNotFoundError(
                f"{model.name} is a part of a split GGUF; name its first one, {first!r}: the "
                "others come with it."
            )
        names = part_names(model.file)
        for name in names:
            if name not in listed:
                meant = did_you_mean(name, ggufs) if name == model.file else ""
                raise ModelNotFoundError(
                    f"{model.repository} on the Hugging Face Hub has no file {name!r}.{meant}"
                )
        return names
    index = None
    if INDEX_NAME in listed:
        index = _read_index(_Plan(model, commit, (_hub_file(model, listed[INDEX_NAME]),)))
    weights = hub_cache.weight_files(listed, index)
    if not weights and ggufs:
        raise ModelNotFoundError(
            f"{model.repository} holds GGUF files; name one of them, as in "
            f"{model.repository}:{ggufs[0]}."
        )
    if not weights:
        raise ModelNotFoundError(
            f"{model.repository} holds no safetensors and no GGUF files, the formats flashdraft "
            "reads."
        )
    for name in weights:
        if name not in listed:
            raise CheckpointError(
                f"{INDEX_NAME} of {model.repository} names {quoted(name)}, which the Hub does not "
                "have; its owner has to complete it."
            )
    return [*hub_cache.settings_files(listed), *weights]


def _read_index(plan: _Plan) -> str:
    file = plan.files[0]
    if not plan.folder.is_linked(plan.commit, file):
        _check_room([plan])
        _fetch(plan, is_index=True)
    try:
        with plan.folder.place(plan.commit, file).open("rb") as stream:
            return stream.read(MAX_JSON_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise ModelNotFoundError(_explain_disk(plan.model, error)) from None


def _check_room(plans: Sequence[_Plan]) -> None:
    """Refuse what the disk has no room for, before anything is fetched."""
    needed = {plan.model.name: plan.num_bytes - plan.num_here for plan in plans if plan.missing}
    if needed:
        check_room(" and ".join(needed), sum(needed.values()), plans[0].folder.root, "HF_HOME")


# -- the fetch ---------------------------------------------------------------------------------


def _fetch(plan: _Plan, is_index: bool = False) -> None:
    """Have every file of a plan in the cache, under its name; one process at a time does that.

    An index is fetched quietly and for itself: its model is not found before the rest is there.
    """
    name, folder = plan.model.name, plan.folder
    waiting = f"Another process fetches {name} or removes it; waiting until it has ended."
    try:
        with locks.held(folder.lock, lambda: say(waiting)):
            missing = plan.missing  # nothing, where the other process had it too
            if missing:
                (folder.path / "blobs").mkdir(parents=True, exist_ok=True)
                folder.note_use(name, is_used=False, begun=plan.begun)
                _fetch_missing(plan, is_quiet=is_index)
            if is_index:
                folder.link(plan.commit, plan.files[0])
                return
            folder.show(plan.commit, plan.files)
            if missing:
                folder.note_use(name, is_fetched=True, is_used=False)
    except OSError as error:
        raise ModelNotFoundError(_explain_disk(plan.model, error)) from None


def _fetch_missing(plan: _Plan, is_quiet: bool) -> None:
    name = plan.model.name
    meter = FetchMeter(name, plan.num_bytes, plan.num_here)
    if not is_quiet:
        _announce(plan)
    try:
        _transfer(plan, meter)
    except KeyboardInterrupt:
        meter.close()
        came = f"{in_words(meter.num_here)} of {in_words(meter.total)}"
        say(f"Interrupted; {came} of {name} are kept. The same command goes on from there.")
        raise
    finally:
        meter.close()
    if not is_quiet:
        say(f"Fetched {name}: {in_words(meter.num_come)} in {meter.describe_time()}.")


def _announce(plan: _Plan) -> None:
    files = "1 file" if len(plan.files) == 1 else f"{len(plan.files)} files"
    here = f", {in_words(plan.num_here)} of it here already" if plan.num_here else ""
    say(f"Fetching {plan.model.name}: {in_words(plan.num_bytes)} in {files}{here}.")
    if plan.licence:
        say(f"Its licence is {plan.licence}: {licence_page(plan.model.repository)}")
    unchecked = [file.name for file in plan.files if file.digest is None]
    if unchecked:
        more = f" and {len(unchecked) - 1} others" if len(unchecked) > 1 else ""
        say(f"Warning: the Hub lists no digest of {unchecked[0]}{more}; only sizes are checked.")


def _transfer(plan: _Plan, meter: FetchMeter) -> None:
    """Fetch what is missing, the small ones first: what is refused is refused at once."""
    stop = threading.Event()
    listener = Listener(meter.add, stop.is_set)
    files = sorted(plan.missing, key=lambda file: file.num_bytes)
    with ThreadPoolExecutor(_WORKERS) as pool:
        tasks = [
            pool.submit(_fetch_one, plan, file, listener) for file in files if not _is_huge(file)
        ]
        try:
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # nothing, where all have ended
            pool.shutdown(cancel_futures=True)
    problems = [task.exception() for task in done]
    for problem in problems:
        if problem is not None and not isinstance(problem, Stopped):
            raise problem
    for file in filter(_is_huge, files):  # in this thread: the client hears of Ctrl-C in no other
        _fetch_one(plan, file, listener)


def _is_huge(file: HubFile) -> bool:
    """Whether the Hub has another way for it, which its client alone knows."""
    return file.num_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE


def _fetch_one(plan: _Plan, file: HubFile, listener: Listener) -> None:
    model, folder = plan.model, plan.folder
    is_huge = _is_huge(file)
    try:
        if is_huge:  # the client keeps no part
            huggingface_hub.hf_hub_download(model.repository, file.name, revision=plan.commit)
            listener.on_bytes(file.num_bytes)
            return
        url = f"{constants.ENDPOINT}/{model.repository}/resolve/{plan.commit}/{quote(file.name)}"
        wanted = Wanted(f"{model.repository}/{file.name}", url, file.num_bytes, file.digest)
        part = folder.part(plan.commit, file)
        fetch_file(wanted, part, _headers(), listener)
        folder.keep(plan.commit, file)
    except (Stopped, CheckpointError):
        raise
    except Exception as error:  # the client's network errors have no common base of its own
        if is_unreachable(error) and not is_huge:
            here = f"{in_words(folder.num_here(plan.commit, file))} of {in_words(file.num_bytes)}"
            raise ModelNotFoundError(
                f"The connection to the Hugging Face Hub was lost, with {here} of {file.name} "
                f"({type(error).__name__}: {' '.join(str(error).split())}). {_GO_ON}"
            ) from error
        if isinstance(error, OSError) and not isinstance(error, hub_errors.HfHubHTTPError):
            raise ModelNotFoundError(_explain_disk(model, error)) from error
        raise ModelNotFoundError(explain(model.repository, file.name, error)) from error


def _headers() -> dict[str, str]:
    """What goes with a request to the Hub: who asks, and the token where there is one."""
    headers = {"User-Agent": f"flashdraft/{VERSION}"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else huggingface_hub.get_token()
    return headers if token is None else {**headers, "Authorization": f"Bearer {token}"}


def _explain_disk(model: HubModel, error: OSError) -> str:
    root = HubFolder(model.repository).root
    return (
        f"{model.name} cannot be stored in {root}: {error.strerror or error}. Free some space, or "
        f"set HF_HOME to another folder. {_GO_ON}"
    )
