"""The engine: requests in, committed tokens out. A step is schedule → draft → verify → commit.

Plain decoding is a step with nothing drafted. Where no request has a grammar, on a GPU, whole
steps, prompts included, run ahead of the host (step/pipeline.py). The engine knows no tokenizer
beyond a decoder made per request, no chat, no threads: one caller, one step at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flashdraft.core import FinishReason, Request, StepStats, TokenEvent
from flashdraft.engine.cache.memory import build_cache
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.config import MAX_VERIFY, EngineConfig
from flashdraft.engine.draft.block import BlockProposer
from flashdraft.engine.draft.ngram import NgramIndex
from flashdraft.engine.draft.proposer import GuardedProposer, Proposer
from flashdraft.engine.drafts import Draft
from flashdraft.engine.live import Ending, Live
from flashdraft.engine.output import TextDecoder, TextOutput
from flashdraft.engine.policy.costs import GPU_COSTS, CostModel
from flashdraft.engine.policy.verify import VerifyPolicy
from flashdraft.engine.policy.width import WidthChooser
from flashdraft.engine.sampling.accept import accept_length, accept_ragged
from flashdraft.engine.sampling.grammar import Constraint, GrammarCompiler
from flashdraft.engine.sampling.process import LogitRows, RequestSampler, is_sound, sample_rows
from flashdraft.engine.scheduler import Scheduler, Work
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.commit import Committer
from flashdraft.engine.step.device import AcceptFunction, DeviceSteps
from flashdraft.engine.step.forward_graphs import ForwardGraphs
from flashdraft.engine.step.pipeline import AHEAD_MARGIN, StepPart, StepPipeline, smallest_batch
from flashdraft.engine.step.runner import Runner, Verified
from flashdraft.engine.validate import validate_request
from flashdraft.errors import RequestError
from flashdraft.kernels.draw.rule import SlotRequest
from flashdraft.models.drafter.model import PackedDrafter
from flashdraft.models.layers import Target

log = logging.getLogger(__name__)

MEASURED_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


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
        accept: AcceptFunction = accept_ragged,
    ) -> None:
        self.config = config or EngineConfig()
        self.target = target
        self._device = target.kernels.device
        self._new_decoder = new_decoder
        self.compile_grammar = grammar_compiler
        cache, self.max_context = build_cache(target, drafter, self.config)
        self.book = PageBook(cache.book_pools, self.config.page_size, self.config.prefix_cache)
        self.scheduler = Scheduler(
            self.book,
            self.config.max_batch,
            max(self.config.max_step_tokens, self.config.max_batch),
            self.config.prefill_chunk,
        )
        max_length = self.max_context + AHEAD_MARGIN
        runs_ahead = self.config.runs_ahead_on(self._device.type)
        graphs = ForwardGraphs(target, cache, max_length) if runs_ahead else None
        self.runner = Runner(target, cache, self.book, graphs)
        block_proposer = None
        if proposer is None and drafter is not None and self.config.verify != 0:
            proposer = block_proposer = BlockProposer(drafter, target, cache, self.book)
        self.proposer = None if proposer is None else GuardedProposer(proposer)
        self._lookahead = self._max_drafts()
        costs = self._measure_costs()
        self.policy = VerifyPolicy(costs, self.config.verify)
        self._pipeline: StepPipeline | None = None
        looks_up = drafter is None and self.config.ngram and self.config.verify != 0
        if runs_ahead and not looks_up and proposer is block_proposer:
            batch = smallest_batch(self.config.max_batch)
            rows = self.scheduler.max_step_tokens
            steps = DeviceSteps(
                target,
                block_proposer,
                cache,
                batch,
                max_length,
                rows,
                accept,
                may_be_guided=self.supports_grammar,
            )
            chooser = WidthChooser(costs, self.policy.survival, self.config.verify)
            self._pipeline = StepPipeline(
                steps, self.book, self.scheduler, chooser, self._describe, target.config.vocab_size
            )
        self._committer = Committer(self.book, self.proposer, self.policy)
        self.last_step = StepStats()
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
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.target.config.eos_token_ids)
        constraint = self._constraint(request, stop_ids)
        limit = min(self.max_context, len(request.prompt_ids) + params.max_tokens)
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

    def prepare(self, at_once: int, seconds: float) -> None:
        """Capture steps of up to so many requests now, for about so long, not while they run."""
        if self._pipeline is not None and not self.has_work:
            self._pipeline.prepare(min(at_once, self.config.max_batch), seconds)

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Advance every scheduled request; return what was committed."""
        events = self._end_cancelled()
        self.last_step = stats = StepStats()
        if self._pipeline is not None:
            committed = self._step_pipelined(self._pipeline, stats)
            if committed is not None:
                return events + committed
        works: list[Work] = []
        try:
            works = self.scheduler.schedule(0 if self._solo else self._lookahead, self._solo)
            self._drop_preempted()
            if not works:
                return events
            drafts = self._draft(works, stats)
            verified = self._verify(works, drafts, stats)
            samples = self._sample(works, drafts, verified)
        except Exception as error:  # whatever broke, the other requests must live on
            if not works:
                raise
            return events + self._recover(works, error)
        except BaseException:  # Ctrl-C: nothing is committed yet, so nothing is lost
            self._preempt_all()
            raise
        try:
            return events + self._commit(works, drafts, verified, samples, stats)
        except BaseException:  # the step is torn: its requests cannot go on, all others can
            for work in works:
                if work.sequence.request.id in self._live:
                    self._end(self._of(work), Ending(FinishReason.CANCELLED))
            self._preempt_all()
            raise

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, queues and sequences agree."""
        self.book.check_integrity()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert {live.sequence for live in self._live.values()} == {*running, *waiting}
        assert all(s in self.book for s in running) and not any(s in self.book for s in waiting)
        for sequence in running:
            assert 0 <= sequence.num_folded <= sequence.num_cached < len(sequence.tokens)

    def _step_pipelined(self, pipeline: StepPipeline, stats: StepStats) -> list[TokenEvent] | None:
        """Advance by a step on the device, where all there is to do can be done there.

        None if it cannot, and then nothing is in flight any more: the engine's own loop is next.
        """
        try:
            suits = self._suits_pipeline()
            if suits and not pipeline.is_flying and self.proposer is not None:
                self.proposer.fold(self.scheduler.running)
                suits = self._suits_pipeline()  # unless the drafter has failed on somebody
            if suits:
                requests = [*self.scheduler.running, *self.scheduler.waiting]
                pipeline.launch(requests[0].request.verify, self._may_admit)
                self._drop_preempted()
            if not pipeline.is_flying:
                pipeline.settle()
                return None
            parts = pipeline.read()
        except Exception as error:  # as in `step`
            pipeline.abandon()
            return self._recover([], error)
        except BaseException:
            pipeline.abandon()
            self._preempt_all()
            raise
        stats.draft_s = pipeline.last_seconds.draft
        stats.verify_s = pipeline.last_seconds.total - stats.draft_s
        try:
            return self._commit_read(parts, stats)
        except BaseException:  # the step is torn, as in `step`
            for part in parts:
                if part.work.sequence.request.id in self._live:
                    self._end(self._of(part.work), Ending(FinishReason.CANCELLED))
            pipeline.abandon()
            self._preempt_all()
            raise

    def _suits_pipeline(self) -> bool:
        """Whether the device can do all that is to be done, with one verify length for all."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if self._solo or not (running or waiting):
            return False
        verify = (running or waiting)[0].request.verify
        if len(running) < self.config.max_batch and waiting and not self._suits(waiting[0], verify):
            return False
        return all(self._suits(sequence, verify) for sequence in running)

    def _suits(self, sequence: RunningSequence, verify: int | None) -> bool:
        return (
            sequence.request.verify == verify
            and sequence.prompt_logprobs is None
            and self._live[sequence.request.id].suits_device
            and (self.proposer is None or self.proposer.serves(sequence))
        )

    def _may_admit(self) -> bool:
        """Whether who waits longest fits among those who run."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        return bool(waiting) and self._suits(waiting[0], (running or waiting)[0].request.verify)

    def _describe(self, sequence: RunningSequence) -> tuple[SlotRequest, bool, Constraint | None]:
        live = self._live[sequence.request.id]
        # the head that writes no logits rounds otherwise: greedy requests would change with others
        is_greedy = live.is_plainly_greedy and not self.target.kernels.exact
        return live.slot_request, is_greedy, live.sampler.constraint

    def _commit_read(self, parts: Sequence[StepPart], stats: StepStats) -> list[TokenEvent]:
        begin = time.perf_counter()
        works = [part.work for part in parts]
        endings: dict[str, Ending] = {}
        for part in parts:
            live = self._of(part.work)
            ending = self._committer.accept_read(part.work, live, part.result, stats)
            if ending is not None:
                endings[part.work.sequence.request.id] = ending
        self._committer.settle_read([work.sequence for work in works])
        stats.verify_lengths = tuple(len(p.result.drafts) for p in parts if p.work.is_decode)
        stats.num_drafted = sum(stats.verify_lengths)
        events = self._report(works, endings)
        stats.commit_s = time.perf_counter() - begin
        return events

    def _draft(self, works: list[Work], stats: StepStats) -> list[Draft | None]:
        begin = time.perf_counter()
        lives = [self._of(work) for work in works]
        fixed = [work.sequence.request.verify for work in works]
        drafts = [self._look_up(work, live) for work, live in zip(works, lives, strict=True)]
        if self.proposer is not None:
            num_decoding = sum(work.is_decode for work in works)
            able = [i for i, w in enumerate(works) if w.room and self.proposer.serves(w.sequence)]
            wanted = self.policy.slots_wanted(
                [lives[i].momentum for i in able], [fixed[i] for i in able], num_decoding
            )
            limits = {i: limit for i, limit in zip(able, wanted, strict=True) if limit}
            blocks = self.proposer.propose(
                [works[i] for i in limits],
                [lives[i].sampler for i in limits],
                list(limits.values()),
            )
            for i, proposed in zip(limits, blocks, strict=True):
                block = self._fit(works[i], lives[i], proposed) or Draft([], [])
                drafts[i] = self.policy.better(lives[i].momentum, drafts[i], block)
        num_rows = sum(work.num_tokens for work in works)
        lengths = self.policy.choose(drafts, [live.momentum for live in lives], fixed, num_rows)
        pairs = list(zip(works, lengths, strict=True))
        stats.verify_lengths = tuple(length for work, length in pairs if work.is_decode)
        stats.num_drafted = sum(lengths)
        stats.draft_s = time.perf_counter() - begin
        return [d.cut(n) if d and n else None for d, n in zip(drafts, lengths, strict=True)]

    def _look_up(self, work: Work, live: Live) -> Draft | None:
        if work.room == 0 or work.sequence.request.verify == 0:
            return None
        found = None
        if live.ngrams is not None:
            found = live.ngrams.propose(work.sequence.tokens, min(work.room, MAX_VERIFY))
        return self._fit(work, live, found)

    def _fit(self, work: Work, live: Live, draft: Draft | None) -> Draft | None:
        """The draft as the request's grammar has it, if there is one."""
        constraint = live.sampler.constraint
        if constraint is None:
            return draft
        return constraint.fit(work.sequence.output_ids, draft, min(work.room, MAX_VERIFY))

    def _verify(self, works: list[Work], drafts: list[Draft | None], stats: StepStats) -> Verified:
        begin = time.perf_counter()
        verified = self.runner.verify(works, drafts)
        stats.verify_s = time.perf_counter() - begin
        return verified

    def _sample(
        self, works: list[Work], drafts: list[Draft | None], verified: Verified
    ) -> list[list[int]]:
        """The target's own tokens for every work, up to the first row that is not sound."""
        kernels, logits = self.target.kernels, verified.logits
        tokens = kernels.argmax(logits) if len(logits) else logits.new_zeros(0).long()
        sound = is_sound(logits, tokens)
        for i, work in enumerate(works):
            sampler, draft = self._of(work).sampler, drafts[i]
            if work.emits and sampler.needs_logits_processing:
                rows = slice(verified.offsets[i], verified.offsets[i + 1])
                tokens[rows], sound[rows] = sample_rows(
                    logits[rows],
                    sampler,
                    work.sequence.output_ids,
                    draft.tokens if draft is not None else [],
                    work.start + work.num_tokens,
                    kernels,
                )
        chosen, can_choose = tokens.tolist(), sound.tolist()
        samples = []
        for begin, end in zip(verified.offsets[:-1], verified.offsets[1:], strict=True):
            first_bad = next((j for j in range(begin, end) if not can_choose[j]), end)
            samples.append(chosen[begin:first_bad])
        return samples

    def _commit(
        self,
        works: list[Work],
        drafts: list[Draft | None],
        verified: Verified,
        samples: list[list[int]],
        stats: StepStats,
    ) -> list[TokenEvent]:
        begin = time.perf_counter()
        endings: dict[str, Ending] = {}
        for i, work in enumerate(works):
            live, logits = self._of(work), verified.logits[slice(*verified.offsets[i : i + 2])]
            work.sequence.score(verified.scores[i])
            draft = drafts[i]
            num_accepted = accept_length(samples[i], draft.tokens if draft is not None else [])
            ending = self._committer.accept(
                work, live, draft, samples[i], num_accepted, LogitRows(logits), stats
            )
            if ending is not None:
                endings[work.sequence.request.id] = ending
        ended = [self._live[request_id].sequence for request_id in endings]
        self._committer.settle(works, verified.taps, verified.row_offsets, ended)
        events = self._report(works, endings)
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
        if self._pipeline is not None:
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

    def _preempt_all(self) -> None:
        self.scheduler.preempt_all()
        for live in self._live.values():
            self.scheduler.recover(live.sequence)
        self._drop_preempted()

    def _drop_preempted(self) -> None:
        for sequence in self.scheduler.preempted:
            if self.proposer is not None:
                self.proposer.forget(sequence)
        self.scheduler.preempted.clear()

    def _recover(self, works: list[Work], error: Exception) -> list[TokenEvent]:
        """A step failed: run requests alone and plainly, and end the one that fails even so."""
        log.warning(
            "a step over %d requests failed: %s: %s", len(works), type(error).__name__, error
        )
        self.last_step = StepStats()
        self._preempt_all()
        if not self._solo:
            self._solo = True
            return []
        return [self._end(self._of(works[0]), Ending.by_failure(error))]

    # -- set-up --------------------------------------------------------------------------------

    def _max_drafts(self) -> int:
        if self.config.verify == 0:
            return 0
        block = self.proposer.max_drafts if self.proposer is not None else 0
        finds = self.config.ngram or self.supports_grammar  # and a grammar forces tokens
        return max(min(block, MAX_VERIFY), MAX_VERIFY if finds else 0)

    def _measure_costs(self) -> CostModel | None:
        """Step costs for the policy, unless nothing is drafted or the verify length is fixed."""
        if self._lookahead == 0 or self.config.verify is not None:
            return None
        if self._device.type == "cuda":  # measured as it goes: a start takes seconds
            return GPU_COSTS
        drafter = None
        if self.proposer is not None:
            sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= self.config.max_batch]
            drafter = self.proposer.measure(sizes)
        return CostModel(self.runner.measure(MEASURED_WIDTHS), drafter)

    def _of(self, work: Work) -> Live:
        return self._live[work.sequence.request.id]
