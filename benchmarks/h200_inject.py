"""What random weights cannot have by themselves: an acceptance rate, and routing.

For h200.py, h200_trees.py and traffic. All are injected from here and are no options of the engine.
Acceptance is a function the engine is given, of few launches: walks of trees are one, beside some
that find out which nodes are verified. Routing is a wrapper around the kernels, of none, except
that uniform routing of one row has launches of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.walks import Histogram, Walks
from flashdraft.kernels.accept import pack_rows
from flashdraft.kernels.composed import compose_mixture
from flashdraft.kernels.interface import Kernels, Mixture, Residual, TreeNodes
from flashdraft.kernels.layout import count_up

NUM_DRAWS = 8192  # steps before the drawn numbers repeat
FAR = 256  # more than any tree is deep
STRATUM = 16  # steps over which a request's numbers are spread evenly: short runs agree better
NUM_TABLES = 61  # of expert choices: a prime, so that a layer sees another one in every capture


WalkFunction = Callable[[Tensor, Tensor, TreeNodes, Tensor, Tensor, Tensor], Tensor]


class PrescribedAcceptance:
    """Accepts each draft slot with a fixed chance, once all before it were accepted.

    Runs of accepted slots are drawn beforehand (P(run >= j) = alpha ** j) and taken one after
    another by a counter on the device, so a captured step accepts something else on every replay.
    The draws are stratified: every single one has that law, and any few dozen of them its mean.

    What is accepted is committed: `samples` get the draft tokens in place of the target's own, so
    that the text is the one that the caches, a grammar's masks and the penalties went along with.
    """

    def __init__(self, alpha: float, max_batch: int, device: torch.device, seed: int) -> None:
        uniform = _draw_evenly(max_batch, torch.Generator().manual_seed(seed))
        log_alpha = torch.tensor(alpha, dtype=torch.float64).log()
        runs = (uniform.clamp(min=1e-300).log() / log_alpha).floor().to(torch.int64)
        self._runs = runs.to(device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(
        self, samples: Tensor, starts: Tensor, nodes: TreeNodes, is_node: Tensor
    ) -> Tensor:
        """What is accepted of each sequence's chain; `samples` get it."""
        runs = self._runs.index_select(0, self._count)[0, : len(starts)]
        self._count.add_(1).remainder_(NUM_DRAWS)
        is_kept = is_node & (nodes.depths <= runs.unsqueeze(1))
        agree(samples, starts, nodes, is_kept)
        return pack_rows(is_kept)


class PrescribedWalks:
    """Accepts as many nodes of each tree as measured walks have it (walks.py).

    The pairs (d, l) of all steps are drawn beforehand and taken one after another by a counter on
    the device, stratified likewise. A chain accepts d of its nodes. A tree accepts a path of l
    nodes that leaves the chain behind the first d of them; where it has none so deep, the deepest;
    of several those that leave the chain nearest to d, and of these the one that was grown first.
    It is walked as far as a tree of so many verified nodes would be: between two measured sizes it
    is one or the other by chance, so that the mean lies between theirs.
    """

    def __init__(
        self, walks: Walks, are_trees: bool, max_batch: int, device: torch.device, seed: int
    ) -> None:
        self._are_trees, self._max_batch, self._seed = are_trees, max_batch, seed
        self._table = self._draw(walks).to(device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._accept = accept_walks if device.type == "cpu" else _accept_at_once()

    def prescribe(self, walks: Walks) -> None:
        """From now on others, through trees of the same sizes."""
        self._table.copy_(self._draw(walks))

    def _draw(self, walks: Walks) -> Tensor:
        """For every step d, l, and the fewest nodes of a tree of which they are.

        [draws, 3, batch, sizes]; the first size is the chain's.
        """
        generator = torch.Generator().manual_seed(self._seed)
        uniform = _draw_evenly(self._max_batch, generator)
        chain = {(d, d): 0.0 for d, _ in walks.largest}
        for (d, _), count in walks.largest.items():
            chain[d, d] += count
        sizes = {0: chain, **(walks.by_size if self._are_trees else {})}
        drawn = torch.stack([_pick(one, uniform) for one in sizes.values()], dim=2)
        share = torch.rand(NUM_DRAWS, self._max_batch, 1, generator=generator)
        below, size = torch.tensor([0, *sizes][:-1]), torch.tensor([*sizes])
        least = size - (share * (size - below)).to(torch.int64)
        return torch.stack([drawn[..., 0], drawn[..., 1], least], dim=1)

    def __call__(
        self, samples: Tensor, starts: Tensor, nodes: TreeNodes, is_node: Tensor
    ) -> Tensor:
        """The path that is accepted of each tree; `samples` get its tokens."""
        path = self._accept(samples, starts, nodes, is_node, self._table, self._count)
        self._count.add_(1)
        return path


def _accept_at_once() -> WalkFunction:
    from benchmarks.h200_walk import accept  # Triton is not everywhere

    return accept


def accept_walks(
    samples: Tensor, starts: Tensor, nodes: TreeNodes, is_node: Tensor, table: Tensor, count: Tensor
) -> Tensor:
    """The paths of all slots, of the draw of this number; `samples` get their tokens."""
    told = table.index_select(0, count % len(table))[0, :, : len(starts)]
    size = (told[2] <= is_node.sum(1, keepdim=True)).sum(1).view(1, -1, 1) - 1
    leaves, length = told[:2].gather(2, size.expand(2, -1, 1))
    path = find_path(nodes, is_node, leaves, length)
    bits = count_up(1 + is_node.shape[1], samples.device)[1:]
    agree(samples, starts, nodes, ((path.unsqueeze(1) >> bits) & 1).to(torch.bool))
    return path


def find_path(nodes: TreeNodes, is_node: Tensor, leaves: Tensor, length: Tensor) -> Tensor:
    """The rows of the path of every slot, as `PrescribedWalks` says; leaves and length [slots, 1].

    A chain's token is the first child of its parent.
    """
    place = count_up(1 + is_node.shape[1], is_node.device)[1:]
    is_again = (nodes.parents.unsqueeze(2) == nodes.parents.unsqueeze(1)).tril(-1).any(2)
    firsts = pack_rows(~is_again)
    is_chain = (nodes.ancestors & ~firsts.unsqueeze(1)) == 0
    on_chain = (nodes.ancestors.unsqueeze(2) >> place) & is_chain.unsqueeze(1)
    missed = (length - nodes.depths) * FAR + (on_chain.sum(2) - leaves).abs()
    is_short = is_node & (nodes.depths <= length)
    # the anchor alone is a path, too
    ends = torch.cat([length * FAR, torch.where(is_short, missed, FAR * FAR)], dim=1).argmin(1)
    rows = torch.cat([torch.ones_like(length), nodes.ancestors], dim=1)
    return rows.gather(1, ends.unsqueeze(1)).squeeze(1)


def _draw_evenly(max_batch: int, generator: torch.Generator) -> Tensor:
    """Numbers from 0 to 1 [draws, batch], spread evenly over any few dozen steps."""
    shape = (NUM_DRAWS // STRATUM, STRATUM, max_batch)
    strata = torch.rand(shape, generator=generator).argsort(1)
    jitter = torch.rand(shape, generator=generator, dtype=torch.float64)
    return ((strata + jitter) / STRATUM).view(NUM_DRAWS, max_batch)


def _pick(histogram: Histogram, uniform: Tensor) -> Tensor:
    """The pairs of a histogram for numbers from 0 to 1: [draws, batch, 2]."""
    pairs = sorted(histogram)
    weights = torch.tensor([histogram[pair] for pair in pairs], dtype=torch.float64)
    edges = weights.cumsum(0) / weights.sum()
    places = torch.searchsorted(edges, uniform, right=True).clamp(max=len(pairs) - 1)
    return torch.tensor(pairs)[places]


def agree(samples: Tensor, starts: Tensor, nodes: TreeNodes, is_kept: Tensor) -> None:
    """Have the target say these nodes, each behind its parent."""
    nobody = samples.shape[0] - 1
    rows = torch.where(is_kept, starts.unsqueeze(1) + nodes.parents, nobody)
    said = torch.where(is_kept, nodes.tokens, -1)
    samples.scatter_(0, rows.flatten(), said.flatten())


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
