"""The kernel interface: every numeric operation of the models, and what a backend can do.

The exactness contract: on the CPU every operation reduces each row in an order that does not depend
on the number of rows, on batch neighbours, on how a prompt was cut into chunks, or on pages. Plain
additions and products are exact that way in torch already; reductions and transcendental functions
are not, so they all live here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flashdraft.kernels.advance import SlotStates as SlotStates  # for those who implement this
from flashdraft.kernels.advance import Verified as Verified
from flashdraft.kernels.convolution import Convolution as Convolution
from flashdraft.kernels.draw.rule import Draw as Draw
from flashdraft.kernels.draw.rule import DrawnRows as DrawnRows
from flashdraft.kernels.draw.rule import HeadProducts as HeadProducts
from flashdraft.kernels.draw.rule import SlotSettings as SlotSettings
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.layout import DraftedSlots as DraftedSlots
from flashdraft.kernels.layout import PassRows as PassRows
from flashdraft.kernels.layout import SlotTables as SlotTables
from flashdraft.kernels.nodes import MAX_NODES
from flashdraft.kernels.nodes import TreeNodes as TreeNodes
from flashdraft.kernels.paths import PathOffers as PathOffers
from flashdraft.kernels.paths import PathScores as PathScores
from flashdraft.kernels.paths import SlotCandidates as SlotCandidates
from flashdraft.kernels.quantized import Matrix
from flashdraft.kernels.settle import PagedTensor as PagedTensor
from flashdraft.kernels.settle import Settled as Settled
from flashdraft.kernels.tree import Offered as Offered
from flashdraft.kernels.tree import Offers as Offers

Choice = tuple[Tensor, Tensor]  # [num_rows, k]: experts (int64), and their shares (float32)


@dataclass(frozen=True)
class PageView:
    """Which query rows belong to which sequence, and where its keys live in one pool of pages.

    Sequence s owns the rows query_start[s] : query_start[s + 1]. Its keys have indices
    0 .. context_lens[s] - 1 (earlier tokens) and then one for each of its own rows. Key j lies in
    page block_table[s, j // page_size] at offset j % page_size. Entries of the table behind a
    sliding window may be stale: no kernel reads a key that the window hides from every row.
    """

    query_start: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32
    block_table: Tensor  # [num_seqs, max_pages] int32
    slots: Tensor  # [num_rows] int64: page * page_size + offset of every row's own key
    page_size: int
    max_query_len: int
    max_key_len: int  # the longest context_len + query_len
    # The same rows in two views, each with some of the sequences: those that have few rows, and
    # those that have many. A kernel may launch each with a plan of its own.
    parts: tuple[PageView, PageView] | None = None

    def followed_by(self, other: PageView) -> PageView:
        """The sequences of both, these first, whose rows follow one another in one array."""
        return PageView(
            query_start=torch.cat([self.query_start[:-1], other.query_start]),
            context_lens=torch.cat([self.context_lens, other.context_lens]),
            block_table=torch.cat([self.block_table, other.block_table]),
            slots=self.slots,
            page_size=self.page_size,
            max_query_len=max(self.max_query_len, other.max_query_len),
            max_key_len=max(self.max_key_len, other.max_key_len),
            parts=(self, other),
        )


MAX_TREE = 1 + MAX_NODES  # rows of a sequence of which not each follows all before it


@dataclass(frozen=True)
class Trees:
    """Rows of a sequence that are a tree: a row follows its ancestors, which come before it.

    A tree has at most MAX_TREE rows, and none lies deeper than any window is wide. Sequences whose
    rows follow one another have every bit set, and may have any number of rows.
    """

    ancestors: Tensor  # [num_rows] int64: bit j = row j of its sequence, or -1; its own bit is set
    depths: Tensor  # [num_rows] int32: how many of its sequence's rows it follows


@dataclass(frozen=True)
class BlockMask:
    """Which rows of a sequence's own block a row sees; earlier keys only the window limits.

    `causal` is the usual rule, not causal lets every row see the whole block. Beside `causal`:
    `ahead` lets a row see some that follow it: [num_rows] int32, how many. They are rows of its
    sequence in the same pass, and the window does not hide them. No row sees less far than a row
    before it: a picture's rows all see as far as its last one.
    `trees` has a row see its ancestors alone, and windows go by its depth instead of its place.
    """

    causal: bool = True
    ahead: Tensor | None = None
    trees: Trees | None = None

    def __post_init__(self) -> None:
        assert self.causal or (self.ahead is None and self.trees is None), "neither stands alone"


CAUSAL = BlockMask(causal=True)
BIDIRECTIONAL = BlockMask(causal=False)


@dataclass(frozen=True)
class Residual:
    """A stream of rows that is still to be summed up.

    delta = the sum of rms_norm(d, w) over one or two (d, w), itself normed by `post` if given;
    stream = (x + delta) * scalar (a tensor of one element). Without deltas it is x.
    """

    x: Tensor
    deltas: Sequence[tuple[Tensor, Tensor]] = ()
    post: Tensor | None = None
    scalar: Tensor | None = None


@dataclass(frozen=True)
class Mixture:
    """An MLP and experts beside it; each, and the router, reads the stream by a norm of its own.

    Weights come from `pack`, those of all experts from `pack_experts`.
    """

    norm: Tensor
    gate_up: Any
    down: Any
    router_norm: Tensor
    router: Any
    num_chosen: int
    scale: Tensor  # [num_experts] float32, of shares
    experts_norm: Tensor
    expert_gate_up: Any
    expert_down: Any
    activation: Activation
    eps: float


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of every position's angles, [num_positions, head_dim // 2] float32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class KeyRebuild:
    """How keys that nobody stored are made of the values: RoPE(weight * value).

    That is the key of a layer with `QKVSpec.share_kv`, a key norm and a value norm. The key of
    index j stands at position j, that of a tree's row at context + depth.
    """

    weight: Tensor  # [head_dim], of the key norm
    rope: RopeTable
    num_rotated: int  # pairs of a head that rotate, the first ones; the angles of others are 0


@dataclass(frozen=True)
class QKVSpec:
    """How one attention layer splits and prepares its fused projection.

    A row holds [q heads | k heads | v heads]. num_heads = 0 means there are no queries (the
    drafter's context). `share_kv`: there are no v heads, the value is the raw key (Gemma 4's full
    layers). Norms are per head: `q_norm`/`k_norm` weights of [head_dim] or None for no norm at all;
    `v_norm` is a weightless norm. RoPE (rotate-half over the whole head) follows the norms, on q
    and k only.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    v_norm: bool = False
    share_kv: bool = False

    @property
    def width(self) -> int:
        """Features in one row of the fused projection."""
        kv_parts = 1 if self.share_kv else 2
        return (self.num_heads + kv_parts * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class Heads:
    """How rows of a fused projection become heads."""

    spec: QKVSpec
    rope: RopeTable
    positions: Tensor  # [num_rows] int64


@dataclass(frozen=True)
class WholeSequences:
    """Rows without a past, whose sequences follow one another: s owns starts[s] : starts[s + 1].

    All rows are somebody's. A sequence may have none.
    """

    starts: Tensor  # [num_seqs + 1] int32
    longest: int  # no sequence has more rows
    known: Sequence[int] | None = None  # the starts on the host; None: it has to ask


@dataclass(frozen=True)
class PagedKeys:
    """The keys and values of one layer that rows attend to, and which of them a row sees.

    With a window, a row at index p (its own key's index) sees key j only if p - j < window, and,
    where the mask is not causal, j - p < window. A causal row sees no key behind p, or behind
    p + ahead where the mask has `ahead`. A tree's row counts the window from context + depth, and
    sees of its own block's first MAX_TREE keys those of its ancestors.
    """

    key_cache: Tensor | None  # [num_pages, page_size, kv_heads, head_dim], as value_cache
    value_cache: Tensor
    view: PageView
    scale: float
    window: int | None
    mask: BlockMask
    rebuild: KeyRebuild | None = None  # given exactly where there is no key_cache


class Kernels(Protocol):
    """What a backend provides. x is [num_rows, features] and contiguous unless said otherwise."""

    name: str
    device: torch.device
    dtype: torch.dtype  # of activations and, unless it is told otherwise, of the key/value cache
    quantize: Scheme | None  # what float weights become as they are packed; None: this dtype
    quantize_head: Scheme | None
    quantize_drafter: Scheme | None
    activations: Scheme | None  # what rows become before weights from `pack` that fit; None: floats
    level: str | None  # of processors that native code was built for
    weight_dtype: str  # what `dtype` calls the weights: "int8" where activations are float32
    exact: bool  # whether rows have the same bits in any pass, at a price; CPUs pay none
    keeps_quantized: bool  # whether weights in few bits can stay as they are
    why_no_fp8_cache: str | None  # what keeps 8-bit keys and values away, with the remedy
    why_no_rebuilt_keys: str | None  # the same for keys that are made of values
    compiles_for: tuple[int, int] | None  # the card, where a first launch may wait for a compiler

    def pack(self, *parts: Matrix, quantize: bool = True) -> Any:
        """Turn weights [out, in] of any dtype into this backend's own format, once.

        Several parts of the same inputs become one weight, stacked by output rows.
        `quantize=False` keeps full precision where the backend would quantise (a router).
        """
        ...

    def pack_head(self, *parts: Matrix) -> Any:
        """The same for the head, which a backend may hold in a format of its own choice."""
        ...

    def holds(self, num_values: int) -> bool:
        """Whether a quantised weight of so many values stays so; else it becomes floats."""
        ...

    def pack_drafter(self, *parts: Matrix) -> Any:
        """The same for a drafter, which may be kept in more bits than its target."""
        ...

    def pack_embedding(self, matrix: Matrix, head: Any | None) -> Any:
        """Turn the embedding table [vocabulary, features] into what `embed` takes.

        `head` is the tied head, packed of the same matrix: a backend may read rows from it instead
        of keeping a second copy.
        """
        ...

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        """Rows of a packed embedding table: [*token_ids.shape, features] in this dtype."""
        ...

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x @ weight.T for a packed weight: [num_rows, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32."""
        ...

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, rms_norm(x + delta, weight))."""
        ...

    def residual_norms(
        self, residual: Residual, outputs: Sequence[Tensor], eps: float
    ) -> tuple[Tensor, list[Tensor]]:
        """What stands between two linears of a sandwich-normed layer.

        The stream and its norms, one for each weight in `outputs` (at most three).
        """
        ...

    def residual_linear(
        self,
        residual: Residual,
        norm: Tensor,
        eps: float,
        weight: Any,
        activation: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stream, and `linear` of its norm: with an activation `gated_linear`."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up for rows [gate | up]: [num_rows, features // 2]."""
        ...

    def gated_linear(self, x: Tensor, weight: Any, activation: Activation) -> Tensor:
        """`gated` of `linear(x, weight)`."""
        ...

    def convolve(self, x: Tensor, convolution: Convolution) -> Tensor:
        """Rows of blocks, each mixed with those just before it: convolution.py."""
        ...

    def prepare_qkv(
        self,
        qkv: Tensor,
        heads: Heads,
        key_cache: Tensor | None,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Split, norm and rotate; write keys and values to their slots; return q.

        The caches are [num_pages, page_size, kv_heads, head_dim]; where there is none for keys,
        values alone are written. Returns [num_rows, num_heads, head_dim].
        """
        ...

    def attention(self, query: Tensor, keys: PagedKeys) -> Tensor:
        """Attention of every row over its sequence's pages: [num_rows, num_heads * head_dim].

        Queries are grouped: query head h reads key head h // (heads / kv_heads).
        """
        ...

    def attend(self, qkv: Tensor, heads: Heads, keys: PagedKeys) -> Tensor:
        """`attention` of what `prepare_qkv` makes of a fused projection, over the view's slots."""
        ...

    def attend_whole(
        self, qkv: Tensor, heads: Heads, sequences: WholeSequences, scale: float
    ) -> Tensor:
        """Attention that keeps nothing: every row sees all rows of its sequence, and no others.

        Heads are made as `prepare_qkv` makes them, as many for keys as for queries. On the CPU a
        row's bits depend on its own sequence alone. On a GPU, in 16 bits, the host need not know
        the starts. Returns [num_rows, num_heads * head_dim].
        """
        ...

    def mixture(self, residual: Residual, parts: Mixture) -> tuple[Tensor, Tensor, Tensor]:
        """The stream, the MLP's output of it, and the experts'."""
        ...

    def both(
        self,
        num_rows: int,
        first: Callable[[], Tensor],
        choose: Callable[[], Choice],
        second: Callable[[Choice], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """first() and second(choose()), in any order or side by side: neither needs the other."""
        ...

    def softmax(self, x: Tensor) -> Tensor:
        """Row-wise softmax in float32."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Index of each row's largest value, the first of equals; NaN is larger than anything."""
        ...

    def draw(self, logits: Tensor | HeadProducts, settings: SlotSettings, rows: DrawnRows) -> Draw:
        """The token of every row of logits [num_rows, vocab], by its slot's settings: draw/rule.py.

        The same on every backend, from logits or from what they are made of, which may be written
        over. On a device nothing waits for it, and a graph can hold it.
        """
        ...

    def offer(self, drawn: Draw, settings: SlotSettings, rows: DrawnRows, count: int) -> Offers:
        """Candidates for every row of a drafter, what it drew first: tree.py. A graph can hold it.

        The settings must have had the draw find the likeliest tokens.
        """
        ...

    def grow(self, offered: Offered, nodes: TreeNodes) -> None:
        """Fill in a tree for each slot, of as many nodes: tree.py. A graph can hold it."""
        ...

    def offer_paths(
        self,
        candidates: SlotCandidates,
        scores: PathScores,
        settings: SlotSettings,
        rows: DrawnRows,
        count: int,
    ) -> PathOffers:
        """Candidates for every row of a drafter with a head, behind each one before it: paths.py.

        A graph can hold it.
        """
        ...

    def follow(self, offers: PathOffers, width: int) -> tuple[Tensor, Tensor]:
        """The chain of each slot of so many rows, behind its anchor always the first offer.

        Tokens [slots, width] int64 and their confidence, float32. A graph can hold it.
        """
        ...

    def share_rows(self, drafted: DraftedSlots, num_rows: int) -> Tensor:
        """How many of so many rows each slot has: layout.py. A graph can hold it."""
        ...

    def lay_out(
        self,
        slots: SlotTables,
        nodes: TreeNodes,
        counts: Tensor | None,
        num_rows: int,
        rows: PassRows,
    ) -> None:
        """Fill in the first rows of a pass: layout.py. A graph can hold it."""
        ...

    def advance(
        self,
        slots: SlotStates,
        step: Verified,
        lines: Tensor,
        history: Tensor | None,
        is_given: bool,
    ) -> None:
        """Let every slot go on behind a step: advance.py. A graph can hold it."""
        ...

    def settler(self, stored: Sequence[PagedTensor]) -> Callable[[Settled], None]:
        """What moves what accepted paths left in caches: settle.py. A graph can hold a call."""
        ...

    def finish_logits(
        self,
        products: Tensor,
        multiplier: float = 1.0,
        softcap: float | None = None,
        forbidden: Tensor | None = None,
    ) -> Tensor:
        """What a head's products say of every column, in float32; they may be written over.

        cap * tanh(x / cap) after `multiplier`; -inf where `forbidden` [num_columns] bool says so.
        """
        ...

    def pack_experts(self, weight: Matrix) -> Any:
        """Turn the weights of all experts, [num_experts, out, in], into this backend's format."""
        ...

    def choose_experts(self, logits: Tensor, num_chosen: int, scale: Tensor) -> Choice:
        """The likeliest experts of every row and their weights: [num_rows, k] int64 and float32.

        softmax over all, the k largest, divided by their sum, times `scale` [num_experts] float32.
        """
        ...

    def route(self, x: Tensor, router: Any, num_chosen: int, scale: Tensor) -> Choice:
        """`choose_experts` from `linear(x, router)`."""
        ...

    def experts(
        self,
        x: Tensor,
        gate_up: Any,
        down: Any,
        chosen: Tensor,
        weights: Tensor,
        activation: Activation,
    ) -> Tensor:
        """Mixture of experts: sum over j of weights[:, j] * expert[chosen[:, j]](x).

        `gate_up` and `down` come from `pack_experts`; chosen [num_rows, k] int64, weights
        [num_rows, k] float32. The sum runs over j in order.
        """
        ...
