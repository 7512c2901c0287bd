"""What a run changes as it goes: gradient and optimizers in memory, all of it on disk.

A resumed run is the same run, bit for bit. A stored state is a folder `state-<step>` of
state.safetensors and state.json, written under another name and renamed: whoever finds one finds it
whole. What the numbers mean is the trainer's business.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from flashdraft.errors import TrainingError
from flashdraft.files import put_in_place
from flashdraft.train.fit.muon import Muon
from flashdraft.train.fit.schedule import Length, TrainConfig

FORMAT = 1
_NAME = re.compile(r"state-(\d{8})")
_TENSORS, _JSON = "state.safetensors", "state.json"


class Gradient:
    """All gradients as one flat tensor: one reduction, one norm, no wait for the device."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
        for parameter, part in zip(parameters, torch.split(self.flat, sizes), strict=True):
            parameter.grad = part.view_as(parameter)  # autograd adds in place

    def zero(self) -> None:
        self.flat.zero_()

    def clip(self, limit: float) -> Tensor:
        """Scale down what is longer than the limit; return the length it had."""
        norm = torch.linalg.vector_norm(self.flat)
        self.flat.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest; Muon's updates have AdamW's size."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if name.startswith("layers.") and p.ndim == 2]
    outer = [p for name, p in named if not (name.startswith("layers.") and p.ndim == 2)]
    groups = [  # a convolution's kernels, of three dimensions, begin as ones
        {"params": [p for p in outer if p.ndim == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in outer if p.ndim != 2], "weight_decay": 0.0},
    ]
    return [
        AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True),
        Muon(inner, lr=config.learning_rate, weight_decay=config.weight_decay),
    ]


@dataclass(frozen=True)
class RunState:
    """Where a run stands, besides its tensors."""

    step: int  # steps done
    seconds: float  # spent on them
    length: Length | None  # None = not planned yet
    settings: dict[str, Any]  # what a resumed run must share
    limits: dict[str, Any]  # how long the run was to be

    @property
    def is_decaying(self) -> bool:
        """Has the learning rate begun to fall? Such a state can be finished, not prolonged."""
        return self.length is not None and self.step > self.length.decay_from


def save_state(
    folder: Path, state: RunState, model: nn.Module, optimizers: Sequence[Optimizer]
) -> Path:
    """Write a state into the run's folder; return its path."""
    path = folder / f"state-{state.step:08d}"
    part = path.with_name(path.name + ".part")
    tensors = _optimizer_tensors(model, optimizers)
    for name, parameter in model.named_parameters():
        tensors[f"parameters.{name}"] = parameter
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(stored, part / _TENSORS, metadata={"format": "pt"})
        text = json.dumps({"format": FORMAT, **asdict(state)}, indent=2)
        (part / _JSON).write_text(text + "\n", encoding="utf-8")
        put_in_place(part, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise TrainingError(
            f"The run's state cannot be written to {path}: {error}. Earlier states are whole; free "
            "some space and run the same command again to resume."
        ) from None
    return path


def read_state(path: Path) -> RunState:
    """Read where a stored run stands, without its tensors."""
    try:
        content = json.loads((path / _JSON).read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        length = content.pop("length")
        return RunState(**content, length=None if length is None else Length(*length))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None


def load_tensors(path: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put a stored run's parameters and optimizer state where they were."""
    stored = _read_tensors(path)
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    values = _take_parameters(stored, shapes, path)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    names = {id(parameter): name for name, parameter in parameters.items()}
    for number, optimizer in enumerate(optimizers):
        entries: dict[int, dict[str, Tensor]] = {}
        for index, parameter in enumerate(_in_order(optimizer)):
            prefix = f"optimizer.{number}.{names[id(parameter)]}."
            found_keys = [name for name in stored if name.startswith(prefix)]
            entries[index] = {name.removeprefix(prefix): stored.pop(name) for name in found_keys}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    if stored:
        raise TrainingError(
            f"The state in {path} is of another version (it holds {min(stored)}). Use another "
            "--out folder."
        )


def is_state(path: Path) -> bool:
    """Is this folder a stored state, whole or not?"""
    return (path / _JSON).is_file() or (
        _NAME.fullmatch(path.name) is not None and not (path / "config.json").is_file()
    )


def read_parameters(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The parameters of a stored run alone, checked."""
    return _take_parameters(_read_tensors(path), shapes, path)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def _take_parameters(
    stored: dict[str, Tensor], shapes: Mapping[str, torch.Size], path: Path
) -> dict[str, Tensor]:
    """Move the parameters out of a state's tensors."""
    taken = {}
    for name, shape in shapes.items():
        value = stored.pop(f"parameters.{name}", None)
        if value is None or value.shape != shape:
            found = "is missing" if value is None else f"has shape {list(value.shape)}"
            raise TrainingError(
                f"The state in {path} is of another drafter: its {name} {found}, this drafter's "
                f"has {list(shape)}. Use another --out folder."
            )
        taken[name] = value
    return taken


def states(folder: Path) -> list[Path]:
    """The run's states, oldest first."""
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def latest(folder: Path, usable: Callable[[RunState], bool] = lambda state: True) -> Path | None:
    """The newest state that can be used, if any."""
    for path in reversed(states(folder)):
        if usable(read_state(path)):
            return path
    return None


def resumable(
    folder: Path, limits: dict[str, Any], config: TrainConfig, length: Length | None
) -> Path | None:
    """The state from which a run of these limits goes on; None where none was stored yet.

    Where there are some, but none will do, TrainingError: to start afresh is the user's decision.
    """
    path = latest(folder, lambda state: state.limits == limits or not state.is_decaying)
    if path is None:
        if not states(folder):
            return None
        raise TrainingError(
            f"Every state in {folder} is of a run whose learning rate falls already, and that run "
            "was to be of another length; run the command that it was started with, or name "
            "another --out folder (--init-from goes on from a drafter's weights)."
        )
    state = read_state(path)
    if state.limits != limits:
        _refuse_too_late(path, state, config, length)
    return path


def drop_later(folder: Path, step: int) -> None:
    """Remove the states after this step: the run goes on from it into another future."""
    for path in states(folder):
        if _step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep_last: int, keep_steps: Iterable[int]) -> None:
    """Remove old states: all but the last ones, and those of the given steps."""
    kept = frozenset(keep_steps)
    for path in states(folder)[:-keep_last]:
        if _step_of(path) not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("state-"))


def _refuse_too_late(
    path: Path, state: RunState, config: TrainConfig, length: Length | None
) -> None:
    """A learning rate that has to fall from an earlier step on cannot begin at this one."""
    remedy = (
        "give the run more, name another --out folder, or remove that state to go on from an "
        "earlier one"
    )
    if length is not None and state.step > length.decay_from:
        raise TrainingError(
            f"{path} stands at step {state.step}, and in a run of {length.steps} steps the "
            f"learning rate falls from step {length.decay_from} on: it is too late for that; "
            f"{remedy}."
        )
    if length is None and config.minutes is not None:
        latest_s = config.minutes * 60 * (1 - config.decay_share)
        if state.seconds > latest_s:
            raise TrainingError(
                f"{path} took {state.seconds / 60:.2f} minutes, and in a run of {config.minutes:g} "
                f"the learning rate falls after {latest_s / 60:.2f}: it is too late for that; "
                f"{remedy}."
            )


def _optimizer_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"optimizer.{number}.{names[id(parameter)]}.{key}": value
        for number, optimizer in enumerate(optimizers)
        for parameter in _in_order(optimizer)
        for key, value in optimizer.state[parameter].items()
    }


def _in_order(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unreadable(path: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"The state in {path} cannot be read: {error}. Remove that folder to resume from the state "
        "before it."
    )
