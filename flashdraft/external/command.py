"""What an outside engine is asked for, and the command that asks it.

`EngineSettings` is the user's wish in our words, `EngineCommand` what vllm.py or sglang.py made of
it: arguments, environment, and what is worth saying about them. Of the engines' own flags only
those are known that may not be passed on.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashdraft.errors import RequestError

KEY_VARIABLE = "FLASHDRAFT_API_KEY"
_HIDDEN = f'"${KEY_VARIABLE}"'  # a printed command may end up in a log
DTYPES = ("auto", "float32", "bfloat16", "float16")
# flags of both engines that stand for ours, which were checked and are watched; uds is vLLM's alone
_OWN_FLAGS = {
    "--host": "--host",
    "--port": "--port",
    "--api-key": "--api-key",
    "--uds": "--host and --port",
}


@dataclass(frozen=True)
class Nodes:
    """One machine of several that serve one model together."""

    count: int
    rank: int  # this machine; 0 answers requests
    head: str  # where the machines meet: HOST:PORT on the one of rank 0

    def __post_init__(self) -> None:
        if self.count < 2:
            raise RequestError(f"--nodes is {self.count}; it must be at least 2, or left out.")
        if not 0 <= self.rank < self.count:
            raise RequestError(
                f"--node-rank is {self.rank}; with {self.count} nodes it must be from 0 to "
                f"{self.count - 1}."
            )
        host, _, port = self.head.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise RequestError(
                f"--head is {self.head!r}; it must be HOST:PORT of the node of rank 0, as in "
                "10.0.0.1:5000."
            )

    @property
    def head_host(self) -> str:
        return self.head.rpartition(":")[0]

    @property
    def head_port(self) -> str:
        return self.head.rpartition(":")[2]


@dataclass(frozen=True)
class EngineSettings:
    """How an engine shall serve; None leaves the choice to the engine."""

    host: str
    port: int
    served_names: tuple[str, ...]
    api_key: str | None = None
    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    dtype: str = "auto"
    verify: int | None = None  # draft tokens per step; None = the whole block
    max_context: int | None = None
    max_batch: int | None = None
    cache_gb: float | None = None
    tensor_parallel: int = 1
    nodes: Nodes | None = None
    ray_address: str | None = None
    takes_pictures: bool = True  # where the model does
    media_domains: tuple[str, ...] = ()  # whose pictures are fetched; others come as data: URLs
    drain_s: float = 30.0  # for running answers to end after a signal, where the engine can wait
    extra: tuple[str, ...] = ()  # the engine's own flags, passed on as they are

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise RequestError(
                f"--tensor-parallel is {self.tensor_parallel}; it must be at least 1."
            )
        if self.dtype not in DTYPES:
            raise RequestError(
                f"dtype is {self.dtype!r}; with an outside engine it must be one of "
                f"{', '.join(DTYPES)}. For quantised weights name a quantised checkpoint."
            )
        if self.nodes is not None and self.ray_address is not None:
            raise RequestError("--nodes and --ray-address are two ways to one end; give one.")
        if self.nodes is not None and self.tensor_parallel % self.nodes.count:
            raise RequestError(
                f"--tensor-parallel is {self.tensor_parallel}, over all {self.nodes.count} nodes; "
                "it must be a multiple of their number."
            )
        if self.device.startswith("cuda:") and self.tensor_parallel > 1:
            raise RequestError(
                f"--device {self.device} is one GPU and --tensor-parallel {self.tensor_parallel} "
                "wants several; use --device cuda, and CUDA_VISIBLE_DEVICES to choose among them."
            )
        for word in self.extra:
            _refuse_own(word)

    @property
    def gpus_here(self) -> int:
        """How many GPUs of this machine are wanted."""
        return self.tensor_parallel // (1 if self.nodes is None else self.nodes.count)

    @property
    def answers(self) -> bool:
        """Whether this machine answers requests."""
        return self.nodes is None or self.nodes.rank == 0


def _refuse_own(word: str) -> None:
    """Refuse a flag that would undo ours: engines take the last of two, and abbreviations."""
    name = word.partition("=")[0].replace("_", "-")  # vLLM reads both; a value may be a secret
    if not name.startswith("--") or name == "--":
        return
    for flag, ours in _OWN_FLAGS.items():
        if flag.startswith(name):
            raise RequestError(
                f"{name} after the -- would undo what serve has checked and watches; leave it out, "
                f"and give {ours} before the --."
            )


@dataclass(frozen=True)
class EngineCommand:
    """A command line, what it needs in its environment, and remarks for the user."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    secret: str | None = None  # what must not be printed

    def shown(self) -> str:
        """The command as one would type it; an API key stays the variable that holds it."""
        words = [f"{name}={self._quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*words, *map(self._quoted, self.arguments)])

    def _quoted(self, word: str) -> str:
        return _HIDDEN if self.secret and word == self.secret else shlex.quote(word)
