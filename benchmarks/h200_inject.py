"""What random weights cannot have by themselves: an acceptance rate, and routing.

For h200.py and traffic. Both are injected from here and are no options of the engine. Acceptance is
a function the engine is given, of about as many launches as the real one; routing is a wrapper
around the kernels, of none, except that uniform routing of one row has launches of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flashdraft.kernels.accept import Acceptance
from flashdraft.kernels.composed import compose_mixture
from flashdraft.kernels.interface import Kernels, Mixture, Residual

NUM_DRAWS = 8192  # steps before the drawn numbers repeat
STRATUM = 16  # steps over which a request's numbers are spread evenly: short runs agree better
NUM_TABLES = 61  # of expert choices: a prime, so that a layer sees another one in every capture


class PrescribedAcceptance:
    """Accepts each draft slot with a fixed chance, once all before it were accepted.

    Runs of accepted slots are drawn beforehand (P(run >= j) = alpha ** j) and taken one after
    another by a counter on the device, so a captured step accepts something else on every replay.
    The draws are stratified: every single one has that law, and any few dozen of them its mean.

    What is accepted is committed: `samples` get the draft tokens in place of the target's own, so
    that the text is the one that the caches, a grammar's masks and the penalties went along with.
    """

    def __init__(self, alpha: float, max_batch: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_DRAWS // STRATUM, STRATUM, max_batch)
        strata = torch.rand(shape, generator=generator).argsort(1)
        jitter = torch.rand(shape, generator=generator, dtype=torch.float64)
        uniform = ((strata + jitter) / STRATUM).view(NUM_DRAWS, max_batch)
        log_alpha = torch.tensor(alpha, dtype=torch.float64).log()
        runs = (uniform.clamp(min=1e-300).log() / log_alpha).floor().to(torch.int64)
        self._runs = runs.to(device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(
        self, samples: Tensor, tokens: Tensor, query_start: Tensor, max_width: int
    ) -> Acceptance:
        """What is accepted of each sequence, and its next token; `samples` get what is accepted."""
        start, end = query_start[:-1].to(torch.int64), query_start[1:].to(torch.int64)
        runs = self._runs.index_select(0, self._count)[0, : len(start)]
        self._count.add_(1).remainder_(NUM_DRAWS)
        accepted = torch.minimum(runs, end - start - 1)
        rows = torch.arange(len(samples), device=samples.device)
        # rows beyond the last sequence's belong to it as well: they are no part of what it accepts
        owner = torch.searchsorted(end, rows, right=True).clamp(max=len(start) - 1)
        is_accepted = rows - start[owner] < accepted[owner]
        samples.copy_(torch.where(is_accepted, tokens.roll(-1), samples))
        return Acceptance(accepted, samples[start + accepted])


class Routing:
    """Kernels whose experts are chosen as the weights have it, or uniformly at random.

    The backend's own choice is computed either way: its cost stays. Uniform choices come from a
    table drawn beforehand, as a view of its first rows; a captured step keeps its choices.
    """

    def __init__(
        self, kernels: Kernels, num_experts: int, num_chosen: int, max_rows: int, seed: int
    ) -> None:
        self._kernels = kernels
        self.is_uniform = False
        self._num_experts, self._num_chosen = num_experts, num_chosen
        device = kernels.device
        generator = torch.Generator(device).manual_seed(seed)
        self._tables = torch.stack(
            [
                torch.rand(max_rows, num_experts, generator=generator, device=device)
                .topk(num_chosen)
                .indices
                for _ in range(NUM_TABLES)
            ]
        )
        self._weights = torch.full((max_rows, num_chosen), 1.0 / num_chosen, device=device)
        self._next = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    @property
    def kernels(self) -> Kernels:
        """This object, as the type it stands in for."""
        return cast(Kernels, self)

    def mixture(self, residual: Residual, parts: Mixture) -> tuple[Tensor, Tensor, Tensor]:
        """The backend's own; with uniform routing composed, so that choices can be replaced."""
        if self.is_uniform:
            return compose_mixture(self.kernels, residual, parts)
        return self._kernels.mixture(residual, parts)

    def route(
        self, x: Tensor, router: Any, num_chosen: int, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The backend's choice; with uniform routing it is computed and passed over."""
        own = self._kernels.route(x, router, num_chosen, scale)
        if not self.is_uniform:
            return own
        num_rows = x.shape[0]
        if num_rows > self._weights.shape[0] or num_chosen != self._num_chosen:
            raise ValueError(f"no table for {num_rows} rows of {num_chosen} experts")
        self._next = (self._next + 1) % NUM_TABLES
        return self._tables[self._next, :num_rows], self._weights[:num_rows]

    def distinct_experts(self, num_rows: int) -> float:
        """Experts that a layer reads for so many rows, as counted."""
        if self.is_uniform:
            tables = self._tables[:, :num_rows]
            return sum(len(set(table.flatten().tolist())) for table in tables) / NUM_TABLES
        device = self._kernels.device
        logits = torch.zeros(num_rows, self._num_experts, device=device, dtype=self._kernels.dtype)
        scale = torch.ones(self._num_experts, device=device)
        chosen, _ = self._kernels.choose_experts(logits, self._num_chosen, scale)
        return float(len(set(chosen.flatten().tolist())))

    @property
    def name_of_routing(self) -> str:
        return "uniform" if self.is_uniform else "degenerate"
