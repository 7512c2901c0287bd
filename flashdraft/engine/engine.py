"""The engine: requests in, committed tokens out. A step is schedule → draft → verify → commit.

Plain decoding is a step with nothing drafted. On a GPU steps run ahead of the host, on a CPU each
is read at once; they are the same steps (step/pipeline.py). The engine knows no tokenizer beyond a
decoder made per request, no chat, no threads: one caller, one step at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flashdraft.core import FinishReason, Request, StepStats, TokenEvent
from flashdraft.engine.ahead import compiling_ahead
from flashdraft.engine.cache.memory import build_cache
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.config import MAX_VERIFY, EngineConfig
from flashdraft.engine.draft.block import BlockProposer
from flashdraft.engine.draft.ngram import NgramIndex
from flashdraft.engine.draft.proposer import GuardedProposer, Proposer
from flashdraft.engine.drafting import HostDrafting
from flashdraft.engine.live import Ending, Live
from flashdraft.engine.output import TextDecoder, TextOutput
from flashdraft.engine.pictures import PictureFeatures
from flashdraft.engine.policy.costs import GPU_COSTS, CostModel
from flashdraft.engine.policy.step import StepPolicy
from flashdraft.engine.policy.times import StepTimes
from flashdraft.engine.policy.verify import VerifyPolicy
from flashdraft.engine.sampling.grammar import Constraint, GrammarCompiler
from flashdraft.engine.sampling.process import RequestSampler
from flashdraft.engine.scheduler import Scheduler, Work
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.commit import Committer
from flashdraft.engine.step.device import DeviceSteps
from flashdraft.engine.step.pieces import AcceptFunction, StepLimits
from flashdraft.engine.step.pipeline import AHEAD_MARGIN, StepPart, StepPipeline
from flashdraft.engine.step.prepare import measure_rows
from flashdraft.engine.step.result import SlotResult
from flashdraft.engine.step.seats import SeatRequest
from flashdraft.engine.step.shape import MAX_CHUNKS
from flashdraft.engine.validate import validate_pictures, validate_request
from flashdraft.errors import CapacityError, RequestError
from flashdraft.media.sizes import MOST_TOKENS
from flashdraft.models.drafter.model import PackedDrafter
from flashdraft.models.layers import Target

log = logging.getLogger(__name__)


class Load(NamedTuple):
    """How full an engine is."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int


class Engine:
    """Continuous batching over one target and, perhaps, one drafter."""

    def __init__(
        self,
        target: Target,
        drafter: PackedDrafter | None = None,
        config: EngineConfig | None = None,
        new_decoder: Callable[[], TextDecoder] | None = None,
        proposer: Proposer | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        accept: AcceptFunction | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.target = target
        self._device = target.kernels.device
        self._new_decoder = new_decoder
        self.compile_grammar = grammar_compiler
        self.pictures = None if target.vision is None else PictureFeatures(target.vision)
        cache, self.max_context = build_cache(target, drafter, self.config)
        self.cache = cache
        self.book = PageBook(cache.book_pools, self.config.page_size, self.config.prefix_cache)
        self.scheduler = Scheduler(
            self.book,
            self.config.max_batch,
            max(self.config.max_step_tokens, self.config.max_batch),
            self.config.prefill_chunk,
        )
        block_proposer = None
        if proposer is None and drafter is not None and self.config.verify != 0:
            proposer = block_proposer = BlockProposer(drafter, target, cache, self.book)
        self.proposer = None if proposer is None else GuardedProposer(proposer)
        self._runs_ahead = (
            self.config.runs_ahead_on(self._device.type) and proposer is block_proposer
        )
        if self.config.tree is not None and not self._runs_ahead:
            raise RequestError("tree is set, but a proposer of one's own drafts chains.")
        self._lookahead = self._max_drafts()
        on_device = block_proposer if self._runs_ahead else None
        try:
            steps = DeviceSteps(target, on_device, cache, self._limits(), accept, self.pictures)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"There is no memory for {self.config.max_batch} requests at once beside the model "
                "and its cache; lower max_batch or cache_gb."
            ) from error
        self.steps = steps
        costs = self._measure_costs(steps)
        self.policy = VerifyPolicy(costs, self.config.verify)
        self.step_policy = StepPolicy(
            StepTimes(costs or GPU_COSTS),
            self.policy.survival,
            self.config.verify if self.proposer is None else self.config.fixed,
            self.scheduler.max_step_tokens,
            steps.num_nodes if steps.pieces.trees.have_branches else 0,
        )
        self._pipeline = StepPipeline(
            steps,
            self.book,
            self.scheduler,
            self.step_policy,
            self._describe,
            target.config.vocab_size,
        )
        self._drafting = HostDrafting(self.proposer, self.policy, self._of)
        kept_up = None if self._runs_ahead else self.proposer
        self._committer = Committer(self.book, kept_up, self.policy, not self._runs_ahead)
        self.last_step = StepStats()
        self._last_decoded: list[SlotResult] = []  # of the same step, as its verify lengths
        self._live: dict[str, Live] = {}
        self._cancelled: list[str] = []
        self._solo = False  # after a failed step: one sequence at a time, and without drafts

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and takes nothing, if it cannot be served."""
        params, vocab_size = request.params, self.target.config.vocab_size
        if request.id in self._live:
            raise RequestError(f"A request with id {request.id!r} is already running.")
        validate_request(request, vocab_size, self.max_context)
        if request.pictures:
            validate_pictures(request, self.target.config.vision, self.pictures is not None)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.target.config.eos_token_ids)
        constraint = self._constraint(request, stop_ids)
        limit = self.max_context
        if params.max_tokens is not None:
            limit = min(limit, len(request.prompt_ids) + params.max_tokens)
        sequence = RunningSequence(request, stop_ids, limit)
        decoder = self._new_decoder() if self._new_decoder is not None else None
        self._live[request.id] = Live(
            sequence,
            RequestSampler(
                params,
                request.seed,
                vocab_size,
                stop_ids,
                request.prompt_ids,
                self._device,
                constraint,
            ),
            TextOutput(decoder, params.stop),
            self.policy.new_request(),
            NgramIndex(self.target.config.forbidden_token_ids) if self.config.ngram else None,
        )
        self.scheduler.add(sequence)

    @property
    def supports_grammar(self) -> bool:
        """Whether a request may have a grammar."""
        return self.compile_grammar is not None

    def _constraint(self, request: Request, stop_ids: frozenset[int]) -> Constraint | None:
        if request.grammar is None:
            return None
        if self.compile_grammar is None:
            raise RequestError(
                "The request has a grammar, which needs llguidance and the model's tokenizer; "
                'install it with: pip install "flashdraft[serve]".'
            )
        grammar, vocab_size = self.compile_grammar(request.grammar), self.target.config.vocab_size
        return Constraint(grammar, stop_ids, request.params.min_tokens, vocab_size)

    def cancel(self, request_id: str) -> None:
        """End a request; its pages are free, and its last event comes, with the next step."""
        if request_id in self._live:
            self._cancelled.append(request_id)

    def flush_cancelled(self) -> list[TokenEvent]:
        """End what was cancelled without running a step."""
        return self._end_cancelled()

    def is_running(self, request_id: str) -> bool:
        """Whether a request has yet to get its last event."""
        return request_id in self._live

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def load(self) -> Load:
        """How full the engine is."""
        pools = self.book.pools
        return Load(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_used=sum(pool.num_pages - pool.num_available for pool in pools),
            pages_total=sum(pool.num_pages for pool in pools),
        )

    def waiting_ids(self) -> set[str]:
        """The requests that are not begun yet, or were preempted."""
        return {sequence.request.id for sequence in self.scheduler.waiting}

    def cancel_all(self) -> list[TokenEvent]:
        """Cancel every request at once; their last events."""
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.cancel(sequence.request.id)
        return self.flush_cancelled()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.book.forget_cached()

    def prepare(self, seconds: float) -> None:
        """Capture steps now, for about so long at most, not while requests wait for them."""
        if self._runs_ahead and not self.has_work:
            max_rows = self.scheduler.max_step_tokens
            with compiling_ahead(self.steps, self.target.kernels, max_rows):
                self._pipeline.prepare(seconds)
        if self.pictures is not None and not self.has_work:
            self.pictures.prepare()

    # -- the step ------------------------------------------------------------------------------

    @property
    def last_walks(self) -> list[tuple[int, int]]:
        """How far each tree of the last step was walked, in the order of its verify lengths."""
        return [one.walk for one in self._last_decoded]

    def step(self) -> list[TokenEvent]:
        """Advance requests by a step; return what was committed."""
        events = self._end_cancelled()
        self.last_step, self._last_decoded = (stats := StepStats()), []
        try:
            parts = self._run(stats)
        except Exception as error:  # whatever broke, the other requests must live on
            return events + self._recover(error)
        except BaseException:  # Ctrl-C: nothing is committed yet, so nothing is lost
            self._start_over()
            raise
        try:
            return events + self._commit(parts, stats)
        except BaseException:  # the step is torn: its requests cannot go on, all others can
            for part in parts:
                if part.work.sequence.request.id in self._live:
                    self._end(self._of(part.work), Ending(FinishReason.CANCELLED))
            self._start_over()
            raise

    def _run(self, stats: StepStats) -> list[StepPart]:
        """What a step did: one that is launched now, or, running ahead, one that was in flight."""
        if not self.has_work:
            return []
        if self._runs_ahead:
            self._pipeline.launch(self._solo)
            self._drop_preempted()
        else:
            may_draft = self._drafting.may_draft and not self._solo
            works = self.scheduler.schedule(self._lookahead if may_draft else 0, self._solo)
            self._drop_preempted()
            if works:
                self._pipeline.launch_planned(works, self._drafting.draft(works, stats))
        if not self._pipeline.is_flying:
            return []
        parts = self._pipeline.read()
        seconds = self._pipeline.last_seconds
        stats.draft_s += seconds.draft
        stats.verify_s = seconds.total - seconds.draft
        if self._runs_ahead:
            choice = self._pipeline.last_choice
            stats.expected_tokens, stats.expected_s = choice.tokens, choice.seconds
            stats.plain_tokens, stats.plain_s = choice.plain_tokens, choice.plain_s
        return parts

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, queues and sequences agree."""
        self.book.check_integrity()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert {live.sequence for live in self._live.values()} == {*running, *waiting}
        assert all(s in self.book for s in running) and not any(s in self.book for s in waiting)
        for sequence in running:
            assert 0 <= sequence.num_folded <= sequence.num_cached < len(sequence.tokens)

    def _describe(self, sequence: RunningSequence) -> SeatRequest:
        live = self._live[sequence.request.id]
        return SeatRequest(live.slot_request, live.sampler.constraint)

    def _commit(self, parts: Sequence[StepPart], stats: StepStats) -> list[TokenEvent]:
        begin = time.perf_counter()
        endings: dict[str, Ending] = {}
        for part in parts:
            ending = self._committer.accept(part, self._of(part.work), stats)
            if ending is not None:
                endings[part.work.sequence.request.id] = ending
        self._committer.settle(parts, [self._live[one].sequence for one in endings])
        self._last_decoded = [part.result for part in parts if part.work.is_decode]
        stats.verify_lengths = tuple(len(one.drafts) for one in self._last_decoded)
        stats.num_drafted = sum(stats.verify_lengths)
        events = self._report([part.work for part in parts], endings)
        stats.commit_s = time.perf_counter() - begin
        return events

    def _report(self, works: Sequence[Work], endings: dict[str, Ending]) -> list[TokenEvent]:
        """What the step brought everybody; whoever ended is taken out."""
        events = []
        for work in works:
            ending = endings.get(work.sequence.request.id)
            if ending is not None:
                events.append(self._end(self._of(work), ending))
            elif work.emits:
                events.append(self._of(work).event(None))
        return events

    # -- ends ----------------------------------------------------------------------------------

    def _end(self, live: Live, ending: Ending) -> TokenEvent:
        """Take a request out of everything; its last event."""
        self.scheduler.remove(live.sequence)
        if self.proposer is not None:
            self.proposer.forget(live.sequence)
        self._pipeline.leave(live.sequence)
        del self._live[live.sequence.request.id]
        self._solo = False
        return live.event(ending)

    def _end_cancelled(self) -> list[TokenEvent]:
        events = []
        while self._cancelled:
            live = self._live.get(self._cancelled[0])
            if live is not None:
                events.append(self._end(live, Ending(FinishReason.CANCELLED)))
            del self._cancelled[0]  # only now: an interrupt must not lose it
        return events

    def _start_over(self) -> None:
        """Everybody waits again, and nothing is in flight; what was committed is kept."""
        self._pipeline.abandon()
        self.scheduler.preempt_all()
        for live in self._live.values():
            self.scheduler.recover(live.sequence)
        self._drop_preempted()

    def _drop_preempted(self) -> None:
        for sequence in self.scheduler.preempted:
            self._pipeline.leave(sequence)
            if self.proposer is not None:
                self.proposer.forget(sequence)
        self.scheduler.preempted.clear()

    def _recover(self, error: Exception) -> list[TokenEvent]:
        """A step failed: run requests alone and plainly, and end the one that fails even so."""
        running = list(self.scheduler.running)
        log.warning(
            "a step over %d requests failed: %s: %s", len(running), type(error).__name__, error
        )
        self.last_step = StepStats()
        self._start_over()
        if not running:
            raise error
        if not self._solo:
            self._solo = True
            return []
        return [self._end(self._live[running[0].request.id], Ending.by_failure(error))]

    # -- set-up --------------------------------------------------------------------------------

    def _limits(self) -> StepLimits:
        """What steps may be asked for; on a CPU, where the host drafts, nothing is filled up."""
        max_batch, max_length = self.config.max_batch, self.max_context + AHEAD_MARGIN
        rows, may_be_guided = self.scheduler.max_step_tokens, self.supports_grammar
        if self.pictures is not None:  # the last chunk of a full step may be a whole picture
            rows += MOST_TOKENS
        if self._runs_ahead:
            looks_up = self.config.ngram and self._lookahead > 0
            most = MAX_VERIFY if looks_up else 0
            room = max_batch, max_length, rows, MAX_CHUNKS
            num_nodes = 0 if self.proposer is None else self._num_nodes(self.proposer.max_drafts)
            return StepLimits(*room, most, looks_up, may_be_guided, num_nodes=num_nodes)
        most = self._lookahead
        return StepLimits(max_batch, max_length, rows, max_batch, most, False, may_be_guided, True)

    def _num_nodes(self, depth: int) -> int:
        """Draft tokens of a tree that is no deeper; 0 = chains. Refuses what would not be exact."""
        if self.config.tree is None:
            return 0
        if self._device.type == "cuda" and self.target.kernels.exact:
            raise RequestError(
                "tree is set, but with exact=True drafts are chains: a tree's sums have another "
                "order on a GPU. Leave out one of the two."
            )
        narrowest = min((w for w in self.cache.windows if w is not None), default=None)
        if narrowest is not None and narrowest <= depth:
            raise RequestError(
                f"tree is set, but the model has a window of {narrowest} tokens, and a tree may be "
                f"{depth} deep; a window must be wider. Leave out tree."
            )
        return self.config.most_nodes

    def _max_drafts(self) -> int:
        if self.config.verify == 0:
            return 0
        block = self.proposer.max_drafts if self.proposer is not None else 0
        finds = self.config.ngram or self.supports_grammar  # and a grammar forces tokens
        return max(min(block, MAX_VERIFY), MAX_VERIFY if finds else 0)

    def _measure_costs(self, steps: DeviceSteps) -> CostModel | None:
        """Step costs for the policy, unless nothing is drafted or the verify length is fixed."""
        if self._lookahead == 0 or self.config.fixed is not None:
            return None
        if self._device.type == "cuda":  # measured as it goes: a start takes seconds
            return GPU_COSTS
        drafter = None
        if self.proposer is not None:
            sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= self.config.max_batch]
            drafter = self.proposer.measure(sizes)
        return CostModel(measure_rows(steps), drafter)

    def _of(self, work: Work) -> Live:
        return self._live[work.sequence.request.id]
