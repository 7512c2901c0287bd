"""Trees of draft tokens: what is offered beside a chain of them, and which of it is verified.

One rule, told here in tensors; a device may have it as kernels of its own (`Kernels.offer`,
`Kernels.grow`). Nothing here waits for the device, and shapes depend on nothing but the arguments'
own: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.draw.arithmetic import gumbel
from flashdraft.kernels.draw.noise import keys_from, random_bits_at
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE, MAX_TOP, Draw, DrawnRows, SlotSettings
from flashdraft.kernels.layout import chances_of, count_up, survival
from flashdraft.kernels.nodes import MAX_NODES, TreeNodes

MAX_OFFERS = 1 + MAX_TOP  # of a row: what was drawn, and the likeliest beside it
DOUBT = 1.5  # drafter and target share the noise, not the logits: what wins here may lose there
NUM_PROPOSERS = 2
BRANCH = 2 * NUM_PROPOSERS  # in the rows of chances: behind the proposers', twice
BEYOND = BRANCH + 1
NUM_SOURCES = BEYOND + 1
TAKEN = 2  # of what is left to a sequence: by its anchor, and by the target's own token
SEEDED_FROM = 16  # with so many nodes the chain is among them, whatever it is worth
_LAST = 1 << 62  # behind whatever is ordered


class Offers(NamedTuple):
    """A drafter's candidates for every row, the drawn token first, the others likeliest first."""

    tokens: Tensor  # [rows, count] int64; 0 where there is none
    confidence: Tensor  # [rows, count] float32; 0 where there is none


class Offered(NamedTuple):
    """What slots have to grow trees from: a chain each, and what else was offered at its places."""

    tokens: Tensor  # [slots, width] int64: the chain
    confidence: Tensor  # [slots, width] float32; 0 = the chain has ended
    sources: Tensor  # [slots] int64: which of the two proposers the chain is of
    # The other proposer's chain, from the anchor on too; [slots, 0] where nobody has any.
    rival_tokens: Tensor  # [slots, width] int64
    rival_confidence: Tensor  # [slots, width] float32; 0 = it has ended
    # Offers for every place, none twice, likeliest first; the chains' own tokens may be among them.
    # A drafter with a head has some for each of its candidates that may come before, and one more
    # list for any other token (paths.py); every other drafter has one for all.
    other_tokens: Tensor  # [slots, width, before, count] int64
    other_confidence: Tensor  # [slots, width, before, count] float32; 0 = there is none
    other_numbers: Tensor  # [slots, width, before, count] int64: whose list follows them
    chain_before: Tensor  # [slots, width] int64: whose list is that of what follows the chain there
    rival_before: Tensor  # [slots, width] int64: the same of the rival chain
    branches: Tensor  # [slots] int32: 0 = nothing but the chain
    lengths: Tensor  # [slots] int32: tokens that the cache holds, the anchor's not among them
    ends: Tensor  # [slots] int64: tokens, prompt included, at which a sequence ends
    # [NUM_SOURCES, buckets] float32: that the target agrees, at a token's turn. By whose word it
    # is: a proposer's on its chain; a proposer's where its chain leaves the other's; that of offers
    # that follow one of the chains; that of all behind those. Offers are unlikely and many: theirs
    # is the part of a confidence that comes true
    chances: Tensor
    edges: Tensor  # [buckets - 1] float32, ascending: of confidences


def offer(drawn: Draw, settings: SlotSettings, rows: DrawnRows, count: int) -> Offers:
    """What was drawn of a drafter's rows, and what else the target may say there.

    A greedy slot's confidence is the token's chance. A sampled slot's is its share of what the
    draw went by, noise and all, among the row's candidates; the likeliest come from before noise.
    """
    ids = torch.cat([drawn.tokens.unsqueeze(1), drawn.top_ids], dim=1)
    logits = torch.cat([drawn.logit.unsqueeze(1), drawn.top_logits], dim=1)
    is_there = (ids >= 0) & (drawn.tokens >= 0).unsqueeze(1)
    is_there[:, 1:] &= ids[:, 1:] != ids[:, :1]
    heat = settings.temperature[rows.owner].unsqueeze(1)
    keys = keys_from(settings.noise[rows.owner], rows.positions).unsqueeze(1)
    peak = logits.masked_fill(~is_there, -math.inf).amax(1, keepdim=True)
    scaled = (logits - peak) / heat.clamp(min=LOWEST_TEMPERATURE)
    scores = (scaled + gumbel(random_bits_at(keys, ids))) / DOUBT
    shares = scores.masked_fill(~is_there, -math.inf).softmax(1)
    chances = (logits - drawn.log_total.unsqueeze(1)).exp()
    confidence = torch.where(heat > 0, shares, chances)
    confidence = torch.where(confidence.isfinite(), confidence, 0.0).clamp(max=1.0)
    worth = torch.where(heat > 0, scores, logits)
    worth[:, 0] = math.inf
    places = rank(worth, is_there)
    ids, confidence = (
        put_in_order(one, places)[:, :count].contiguous() for one in (ids, confidence)
    )
    return Offers(ids, confidence)


def rank(worth: Tensor, is_there: Tensor) -> Tensor:
    """Everybody's place if the largest come first, and of equals the earlier; the absent behind."""
    count = worth.shape[1]
    number, own, other = count_up(count, worth.device), worth.unsqueeze(2), worth.unsqueeze(1)
    is_before = (other > own) | ((other == own) & (number < number.unsqueeze(1)))
    is_before &= is_there.unsqueeze(1)
    return torch.where(is_there, is_before.sum(2), count)


def put_in_order(values: Tensor, places: Tensor) -> Tensor:
    """Values of rows at such places; 0 where there is none."""
    rows, count = values.shape
    return values.new_zeros(rows, count + 1).scatter_(1, places, values)


def grow(offered: Offered, num_nodes: int) -> TreeNodes:
    """The likeliest nodes of each slot's tree, best first.

    A node survives by its own chance times its parent's survival; nothing is deeper than the chain
    is wide, nor so deep that nothing is left for the target's own token behind it. A parent on the
    chain, as the anchor is, has the chain's next token for its first child, and then what was
    offered there; one on the rival chain alone has that one's; any other has what was offered at
    its place. Where the rival chain leaves the chain, its token is a child
    too, before the first offer that is no likelier; what is on both is the chain's. A frontier
    holds every parent's next child. The likeliest leaves it, of equals the less deep, then the one
    that came first; its own first child and its next sibling come, and count for no more than it.
    With at least SEEDED_FROM nodes, and without branches, the chain comes first.
    """
    assert num_nodes <= MAX_NODES
    offered, count = _cut(offered), offered.other_tokens.shape[3]
    chances = offered.chances, offered.edges
    alive = survival(offered.confidence, offered.sources, *chances)
    if count + offered.rival_tokens.shape[1] == 0:
        return _grow_chain(offered, alive, num_nodes)
    seeded = offered.branches <= 0
    if num_nodes >= SEEDED_FROM:
        seeded = torch.ones_like(seeded)
    seeds = _grow_chain(offered, torch.where(seeded.unsqueeze(1), alive, 0.0), num_nodes)
    children = _list_children(offered, alive)
    rows = _start(seeds, children, seeded, 3 + count)
    num_seeds = (seeds.survival > 0).sum(1, keepdim=True)
    for row in range(1, 1 + num_nodes):
        _take_best(rows, children, row, num_seeds)
    is_there = rows.survival[:, 1:] > 0
    cells = rows.cells[:, 1:]
    return TreeNodes(
        torch.where(is_there, children.tokens.gather(1, cells), 0),
        rows.parents[:, 1:].contiguous(),
        rows.ancestors[:, 1:].contiguous(),
        rows.depths[:, 1:].to(torch.int32),
        torch.where(is_there, children.confidence.gather(1, cells), 0.0),
        rows.survival[:, 1:].contiguous(),
        torch.where(is_there, children.sources.gather(1, cells), 0).to(torch.int32),
    )


def _cut(offered: Offered) -> Offered:
    """Without what is too deep for a sequence that ends soon."""
    width, room = offered.tokens.shape[1], offered.ends - offered.lengths - TAKEN
    is_near = count_up(width, room.device) < room.unsqueeze(1)
    rival = is_near[:, : offered.rival_confidence.shape[1]]
    return offered._replace(
        confidence=offered.confidence * is_near,
        rival_confidence=offered.rival_confidence * rival,
        other_confidence=offered.other_confidence * is_near.view(*is_near.shape, 1, 1),
    )


def _grow_chain(offered: Offered, alive: Tensor, num_nodes: int) -> TreeNodes:
    """Nothing but the chain, up to where nothing survives."""
    spare, device = num_nodes - alive.shape[1], alive.device
    tokens, confidence, alive = (
        F.pad(one, (0, spare)) for one in (offered.tokens, offered.confidence, alive)
    )
    is_there, place = alive > 0, count_up(num_nodes, device)
    alone, in_chain = _words(num_nodes, device)
    return TreeNodes(
        torch.where(is_there, tokens, 0),
        torch.where(is_there, place, 0),
        torch.where(is_there, in_chain, alone),
        torch.where(is_there, 1 + place, 1).to(torch.int32),
        torch.where(is_there, confidence, 0.0),
        alive,
        torch.where(is_there, offered.sources.unsqueeze(1), 0).to(torch.int32),
    )


@cache
def _words(num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ancestors of nodes that follow the anchor alone, and of nodes that follow one another."""
    own = 1 << torch.arange(1, 1 + num_nodes, device=device)
    return own | 1, own | (own - 1)


class _Children(NamedTuple):
    """Lists of children, one after another, of which each ends with a chance of 0.

    Of every place, and of the one behind the last: first of the parents on the chain, then of those
    on the rival chain alone, then of all others, by whose list follows them. [slots, cells] each.
    """

    tokens: Tensor
    confidence: Tensor
    chances: Tensor  # float64
    sources: Tensor  # int64: rows of the chances
    lists: Tensor  # int64: where a child's own children begin
    is_chain: Tensor  # [slots, places]: whether the chain goes on there


def _list_children(offered: Offered, alive: Tensor) -> _Children:
    width, _, count = offered.other_tokens.shape[1:]
    places, room = count_up(width, alive.device), 3 + count
    num_cells = (1 + width) * room  # of the lists of all places
    is_chain, spare = alive > 0, width - offered.rival_tokens.shape[1]
    rival, sure = (F.pad(one, (0, spare)) for one in offered[3:5])
    others, other_sure, numbers = (_by_kind(one, offered) for one in offered[5:8])
    # a column for each of the chains and every offer
    tokens, confidence = (
        torch.cat(
            [torch.stack([one, other], 2).unsqueeze(1).expand(-1, own.shape[1], -1, -1), own], 3
        )
        for one, other, own in (
            (offered.tokens, rival, others),
            (offered.confidence, sure, other_sure),
        )
    )
    sources = _sources_of(offered, tokens.shape[1], count)
    likely = chances_of(confidence, sources, *offered[-2:])
    shares = (confidence * likely.to(torch.float32)).clamp(max=1.0)
    likely = torch.where(sources >= BRANCH, shares.double(), likely)
    is_there = likely > 0
    is_there[:, :, :, 1:] &= offered.branches.view(-1, 1, 1, 1) > 0
    agreed = (is_chain & (sure > 0) & (rival == offered.tokens)).to(torch.int64)
    is_there[:, 0, :, 0] = is_chain
    is_there[:, 0, :, 1] &= places == agreed.cumprod(1).sum(1, keepdim=True)
    is_there[:, 1, :, 0] = False
    is_there[:, 2:, :, :2] = False
    for column in range(2):
        is_own = tokens[..., 2:] == tokens[..., column : column + 1]
        is_there[..., 2:] &= ~(is_there[..., column : column + 1] & is_own)
    order = _order(is_there, likely)

    def listed(values: Tensor) -> Tensor:
        cells = torch.where(is_there, values, 0).gather(3, order)
        return F.pad(cells, (0, 1, 0, 1)).flatten(1)

    kinds = F.pad(2 + numbers, (2, 0))  # of the children's own lists: 0 for the chain's
    kinds[..., 1] = 1
    follows = kinds * num_cells + (1 + places).unsqueeze(1) * room
    lists = map(listed, (tokens, confidence, likely, sources, follows))
    return _Children(*[*lists, F.pad(is_chain, (0, 1))])


def _by_kind(values: Tensor, offered: Offered) -> Tensor:
    """What is offered behind the chain, behind the rival one, and behind each of the others.

    [slots, width, before, count] -> [slots, 2 + before, width, count].
    """
    places = torch.stack([offered.chain_before, offered.rival_before], dim=2).unsqueeze(3)
    behind_chains = values.gather(2, places.expand(-1, -1, -1, values.shape[3]))
    return torch.cat([behind_chains, values], dim=2).transpose(1, 2)


def _sources_of(offered: Offered, num_kinds: int, count: int) -> Tensor:
    """Rows of the chances [slots, kinds, 1, 2 + count], by lists and columns."""
    own = offered.sources.view(-1, 1, 1, 1)
    sources = torch.full((len(own), num_kinds, 1, 2 + count), BRANCH, device=own.device)
    sources[:, 2:] = BEYOND
    sources[..., :1], sources[..., 1:2] = own, 1 - own
    sources[:, 0, :, 1] += NUM_PROPOSERS
    return sources


def _order(is_there: Tensor, likely: Tensor) -> Tensor:
    """The columns of every list in the order of the children, those that are none behind."""
    is_behind = is_there[..., 2:] & (likely[..., 2:] <= likely[..., 1:2])
    ranks = torch.full_like(is_there, 2, dtype=torch.int8)
    ranks[..., 0] = 0
    ranks[..., 2:] = 1 + 2 * (is_behind.to(torch.int8).cumsum(3) > 0)
    return torch.where(is_there, ranks, 4).sort(dim=3, stable=True).indices


class _Rows(NamedTuple):
    """Rows of growing trees, [slots, 1 + nodes] each, and every one's next child."""

    survival: Tensor  # float64
    depths: Tensor  # int64, as all that follow but one
    parents: Tensor
    ancestors: Tensor
    cells: Tensor  # of the row itself
    cursors: Tensor  # the cell of its next child
    worth: Tensor  # float64: that child's survival
    latest: Tensor  # its latest child; before it has any, itself


def _start(seeds: TreeNodes, children: _Children, seeded: Tensor, room: int) -> _Rows:
    """Rows of seeds, by the cells of a list; where seeds are the chain's, each has that child."""
    shape = seeds.parents.shape
    number = count_up(1 + shape[1], seeds.parents.device)
    behind = number.clamp(max=children.is_chain.shape[1] - 1)
    cursors = behind * room + (children.is_chain[:, behind] & seeded.unsqueeze(1))
    survival = F.pad(seeds.survival, (1, 0), value=1.0)
    return _Rows(
        survival,
        F.pad(seeds.depths.to(torch.int64), (1, 0)),
        F.pad(seeds.parents, (1, 0)),
        F.pad(seeds.ancestors, (1, 0), value=1),
        F.pad(behind[:-1] * room, (1, 0)).expand_as(cursors).clone(),
        cursors,
        children.chances.gather(1, cursors) * survival,
        number.expand_as(cursors).clone(),
    )


def _take_best(rows: _Rows, children: _Children, row: int, num_seeds: Tensor) -> None:
    """Make the likeliest of all rows' next children this row, where it is not a seed."""
    best = rows.worth.amax(1, keepdim=True)
    order = rows.depths * (1 + MAX_NODES) + rows.latest
    parent = torch.where(rows.worth == best, order, _LAST).argmin(1, keepdim=True)
    is_new = (best > 0) & (row > num_seeds)
    cell = rows.cursors.gather(1, parent)

    def write(column: Tensor, value: Tensor | int) -> None:
        column[:, row : row + 1] = torch.where(is_new, value, column[:, row : row + 1])

    write(rows.survival, best)
    write(rows.depths, rows.depths.gather(1, parent) + 1)
    write(rows.parents, parent)
    own = _words(MAX_NODES, parent.device)[0][row - 1]
    write(rows.ancestors, rows.ancestors.gather(1, parent) | own)
    write(rows.cells, cell)
    first, following = children.lists.gather(1, cell), cell + is_new
    write(rows.cursors, first)
    rows.cursors.scatter_(1, parent, following)
    write(rows.worth, torch.minimum(children.chances.gather(1, first) * best, best))
    beside = children.chances.gather(1, following) * rows.survival.gather(1, parent)
    left = torch.where(is_new, torch.minimum(beside, best), rows.worth.gather(1, parent))
    rows.worth.scatter_(1, parent, left)
    rows.latest.scatter_(1, parent, torch.where(is_new, row, rows.latest.gather(1, parent)))
