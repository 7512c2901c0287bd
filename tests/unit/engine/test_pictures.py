"""Requests with pictures: what is refused, what the tower does, and what happens where it fails."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from flashdraft.core import FinishReason, Picture, PlacedPicture, SamplingParams
from flashdraft.engine import pictures as pictures_module
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.pictures import PictureFeatures
from flashdraft.engine.step.picture_rows import PassPictures
from flashdraft.engine.step.shape import PromptChunk
from flashdraft.engine.validate import MAX_PICTURES
from flashdraft.errors import RequestError
from flashdraft.models.vision.fixed import FixedPasses
from flashdraft.models.vision.tower import Gemma4VisionTower
from tests import pictured, zoo
from tests.pictured import picture, request, words
from tests.unit.models.vision.towers import shown, tiny_tower

CONFIG = EngineConfig(verify=3, cache=CacheOptions(cache_gb=0.01), max_step_tokens=64)
LOOPS = {"at_once": False, "ahead": True}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def engine_of(**settings):
    target = pictured.tiny_target(zoo.kernels(pictured.BACKENDS[-1]))
    return Engine(target, None, dataclasses.replace(CONFIG, **settings))


def some(name, *pictures):
    return request(name, [words(5), *pictures, words(3)], PARAMS)


# -- what is refused -------------------------------------------------------------------------------

GOOD = some("a", picture("a", 9))


def placed(*places):
    """The good request with its pictures at other places: (start, tokens) of each."""
    pictures = tuple(PlacedPicture(start, picture("a", count)) for start, count in places)
    return dataclasses.replace(GOOD, pictures=pictures)


@pytest.mark.parametrize(
    ("bad", "words_of_it"),
    [
        (placed((4, 9)), "all of them must be the placeholder 60"),
        (placed((5, 10)), "all of them must be the placeholder 60"),
        (placed((5, 5), (9, 5)), "Picture 2 is at tokens 9 to 14"),
        (placed((10, 4), (5, 5)), "without overlap, from token 14 on"),
        (placed((-1, 3)), "without overlap"),
        (placed((5, 30)), "within its 17 tokens"),
        (placed((5, 0)), "takes 0 tokens; it must be between 1 and 1120"),
        (placed((5, 1121)), "takes 1121 tokens; .* between 1 and 1120"),
        (
            some("a", *[picture("a", 1)] * (MAX_PICTURES + 1)),
            f"it may have {MAX_PICTURES}. Leave some out",
        ),
        (dataclasses.replace(GOOD, prompt_logprobs=0), "prompt_logprobs does not go with pictures"),
    ],
)
def test_a_request_whose_pictures_make_no_sense_is_refused(bad, words_of_it):
    engine = engine_of()
    with pytest.raises(RequestError, match=words_of_it):
        engine.submit(bad)
    assert not engine.has_work
    engine.submit(GOOD)
    engine.submit(some("b", *[picture("a", 1)] * MAX_PICTURES))
    engine.submit(some("c", picture("a", 64)))


def test_a_target_without_a_tower_says_so():
    blind = Engine(zoo.tiny_target("gemma4", zoo.kernels(pictured.BACKENDS[-1])), config=CONFIG)
    with pytest.raises(RequestError, match="this model takes none"):
        blind.submit(GOOD)
    assert blind.pictures is None and blind.steps._pictures is None
    target = pictured.tiny_target(zoo.kernels(pictured.BACKENDS[-1]))
    target.vision = None
    with pytest.raises(RequestError, match="loaded without its vision tower"):
        Engine(target, config=CONFIG).submit(GOOD)


# -- the tower -------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", LOOPS.values(), ids=LOOPS)
def test_pictures_of_a_step_are_encoded_in_one_call_and_once(run_ahead):
    engine = engine_of(run_ahead=run_ahead, max_step_tokens=200)
    a, b, c = (picture(name, 9) for name in "abc")
    zoo.run(engine, [some("r0", a, b), some("r1", b, c), some("r2", a)])
    assert engine.target.vision.calls == [[a.key, b.key, c.key]]
    assert (engine.pictures.num_encoded, engine.pictures.num_found) == (3, 2)


@pytest.mark.parametrize("run_ahead", LOOPS.values(), ids=LOOPS)
def test_a_picture_that_the_prefix_cache_covers_is_never_encoded(run_ahead):
    engine = engine_of(run_ahead=run_ahead)
    first = request("first", [words(7), picture("a", 9), words(20)], PARAMS)
    zoo.run(engine, [first])
    engine.pictures._kept.clear()
    again = request("again", [words(7), picture("a", 9), words(20), picture("b", 4)], PARAMS)
    assert zoo.run(engine, [again])["again"].stats.cached_tokens >= 16
    assert engine.target.vision.encoded == [picture("a", 9).key, picture("b", 4).key]


def test_another_picture_of_the_same_size_gets_another_answer():
    engine = engine_of()
    params = dataclasses.replace(PARAMS, logprobs=0)
    parts = {name: [words(7), picture(name, 9), words(20)] for name in "abab"}
    done = [
        zoo.run(engine, [request(f"{name}{turn}", parts[name], params)])[f"{name}{turn}"]
        for turn, name in enumerate("abab")
    ]
    assert [one.stats.cached_tokens > 0 for one in done] == [False, False, True, True]
    assert done[0].logprobs == done[2].logprobs != done[1].logprobs == done[3].logprobs


def test_who_is_cancelled_before_costs_the_tower_nothing():
    engine = engine_of(max_batch=1)
    engine.submit(some("first", picture("a", 9)))
    engine.submit(some("second", picture("b", 9)))
    engine.step()
    engine.cancel("second")
    zoo.run(engine, [])
    assert engine.target.vision.encoded == [picture("a", 9).key]


ERRORS = [RuntimeError("the tower is on fire"), torch.OutOfMemoryError("CUDA out of memory")]


@pytest.mark.parametrize("run_ahead", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_tower_that_fails_ends_its_request_alone(error, run_ahead):
    engine, bad = engine_of(run_ahead=run_ahead), picture("bad", 9)
    healthy = [some("r0", picture("a", 9)), some("r1"), some("r2", picture("b", 20))]
    expected = {k: g.token_ids for k, g in zoo.run(engine_of(), healthy).items()}
    engine.target.vision.errors[bad.key] = error
    victim = request("victim", [words(9, seed=2), picture("a", 9), bad, [5]], PARAMS)
    done = zoo.run(engine, [healthy[0], victim, *healthy[1:]])
    failed = done.pop("victim")
    assert failed.finish_reason is FinishReason.ERROR and failed.token_ids == []
    is_memory = isinstance(error, torch.OutOfMemoryError)
    assert ("out of memory" if is_memory else "RuntimeError: the tower is on fire") in failed.error
    assert {name: one.token_ids for name, one in done.items()} == expected
    assert all(pool.num_available == pool.num_pages for pool in engine.book.pools)
    engine.target.vision.errors.clear()
    after = zoo.run(engine, [dataclasses.replace(victim, id="after")])["after"]
    assert after.error is None and len(after.token_ids) == 6


def test_a_tower_that_fails_once_costs_no_request():
    engine, one = engine_of(), picture("a", 9)
    expected = zoo.run(engine_of(), [some("r", one)])["r"].token_ids
    tower = engine.target.vision
    encode, tower.errors[one.key] = tower.encode, RuntimeError("a hiccup")

    def once(pictures):
        try:
            return encode(pictures)
        finally:
            tower.errors.clear()

    tower.encode = once
    assert zoo.run(engine, [some("r", one)])["r"].token_ids == expected


# -- features that are kept ------------------------------------------------------------------------


def test_features_are_kept_within_their_bytes_the_latest_longest():
    tower = pictured.KeyTower(8)
    features = PictureFeatures(tower, max_bytes=3 * 10 * 8 * 4)
    a, b, c, d = (picture(name, 10) for name in "abcd")
    for one in (a, b, c, a, d):  # b is the one that was not wanted for longest
        (rows,) = features.of([one])
        assert torch.equal(rows, pictured.features_of(one, 8))
    tower.calls.clear()
    features.of([a, c, d])
    assert tower.calls == []
    features.of([b])
    assert tower.calls == [[b.key]]
    large = picture("large", 31)
    assert len(features.of([large, large])[1]) == 31
    assert not features._kept and features._num_bytes == 0
    assert (features.num_encoded, features.num_found) == (6, 5)


def test_features_keep_nothing_of_their_neighbours():
    features = PictureFeatures(pictured.KeyTower(8))
    features.of([picture(name, 10) for name in "abc"])
    sizes = {rows.untyped_storage().nbytes() for rows in features._kept.values()}
    assert sizes == {10 * 8 * 4} and features._num_bytes == 3 * 10 * 8 * 4


def test_what_is_kept_makes_room_where_memory_ends():
    """The step is tried again: by then the tower has what the features of others had."""
    tower, full = pictured.KeyTower(8), picture("full", 10)
    features = PictureFeatures(tower)
    features.of([picture("a", 10), picture("b", 10)])
    tower.errors[full.key] = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        features.of([full])
    assert not features._kept and features._num_bytes == 0
    tower.errors.clear()
    assert torch.equal(features.of([full])[0], pictured.features_of(full, 8))


def test_a_tower_that_makes_another_number_of_rows_is_not_believed():
    features = PictureFeatures(pictured.KeyTower(8))
    wrong = Picture(b"", 0, 0, 3, b"k" * 32)
    features._tower.encode = lambda pictures: [torch.zeros(4, 8)]
    with pytest.raises(AssertionError, match="another number of rows"):
        features.of([wrong])
    assert not features._kept


# -- as on a GPU ---------------------------------------------------------------------------------


class Recorded:
    """Graphs that count runs, and fail where they are told to."""

    broken = False

    def __init__(self, device):
        self.runs, self.failed = Counter(), set()

    def is_ready(self, key):
        return self.runs[key] > 1 or key in self.failed

    def call(self, key, function):
        self.runs[key] += 1
        if self.broken and self.runs[key] > 1:
            self.failed.add(key)
        return function()


@pytest.fixture
def capturable(monkeypatch):
    monkeypatch.setattr(Gemma4VisionTower, "is_capturable", True)
    monkeypatch.setattr(pictures_module, "Graphs", Recorded)
    monkeypatch.setattr(FixedPasses.__init__, "__defaults__", ((6, 12),))
    return tiny_tower(zoo.kernels(pictured.BACKENDS[-1]))


def test_every_pass_is_prepared_and_serves(capturable):
    features, pictures = PictureFeatures(capturable), [shown(2, 3), shown(2, 2)]
    features.prepare()
    runs = features._captured._graphs.runs
    assert runs == {("tower", 6): 2, ("tower", 12): 2}
    found = features.of(pictures)
    assert runs == {("tower", 6): 2, ("tower", 12): 3}
    for one, expected in zip(found, capturable.encode(pictures), strict=True):
        assert torch.equal(one, expected)
    assert features._num_bytes == sum(one.untyped_storage().nbytes() for one in found)


def test_what_cannot_be_captured_runs_as_it_is(capturable, monkeypatch):
    monkeypatch.setattr(Recorded, "broken", True)
    prepared, other, one = PictureFeatures(capturable), PictureFeatures(capturable), shown(2, 3)
    prepared.prepare()
    assert prepared._captured is None
    for seed in range(2):
        assert other._captured is not None
        other.of([shown(2, 3, seed)])
    assert other._captured is None
    (expected,) = capturable.encode([one])
    for features in (prepared, other):
        assert torch.equal(features.of([one])[0], expected)


def test_a_tower_that_cannot_be_prepared_runs_as_it_is(capturable, monkeypatch, caplog):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    features = PictureFeatures(capturable)
    monkeypatch.setattr(FixedPasses, "rehearse", full)
    features.prepare()
    assert "cannot be prepared, it is slower: CUDA out of memory" in caplog.text
    assert features._captured is None and len(features.of([shown(2, 3)])[0]) == 6


def test_on_a_cpu_there_is_nothing_to_prepare():
    features = PictureFeatures(tiny_tower(zoo.kernels(pictured.BACKENDS[-1])))
    features.prepare()
    assert features._captured is None


# -- rows of a pass --------------------------------------------------------------------------------


def chunk(count, *pictures):
    places = [PlacedPicture(start, one) for start, one in pictures]
    return PromptChunk(0, 0, [5] * count, True, pictures=places)


def pass_pictures(captured):
    features = PictureFeatures(pictured.KeyTower(8))
    return PassPictures(features, torch.zeros(30, 8), captured, torch.from_numpy)


@pytest.mark.parametrize("captured", [True, False])
def test_rows_of_pictures_lie_behind_those_who_decode(captured):
    pictures, a, b = pass_pictures(captured), picture("a", 3), picture("b", 2)
    pictures.lay_out(4, [chunk(5, (1, a)), chunk(3), chunk(6, (0, b), (2, b))])
    rows = pictures.rows(20)
    ahead = [0] * 5 + [2, 1, 0] + [0] * 4 + [1, 0, 1, 0] + [0] * 4
    assert rows.ahead.tolist() == ahead and rows.ahead.dtype == torch.int32
    own = [5, 6, 7, 12, 13, 14, 15]
    assert rows.is_picture.nonzero().flatten().tolist() == own
    expected = torch.cat([pictured.features_of(one, 8) for one in (a, b, b)])
    assert torch.equal(rows.features[own], expected)


def test_the_next_pass_has_nothing_of_the_last():
    pictures = pass_pictures(captured=True)
    pictures.lay_out(2, [chunk(20, (3, picture("a", 12)))])
    first = pictures.rows(30)
    pictures.lay_out(0, [chunk(9, (8, picture("b", 1)))])
    assert first.is_picture.nonzero().flatten().tolist() == [8]
    assert not first.ahead.any()
    pictures.lay_out(1, [chunk(25)])
    assert not first.is_picture.any() and not first.ahead.any()
    assert pictures.rows(30).features.data_ptr() == first.features.data_ptr()
    assert pass_pictures(captured=False).rows(30) is None
    with pytest.raises(RuntimeError):  # what fails leaves nothing behind either
        pictures._source._tower.errors[picture("c", 2).key] = RuntimeError()
        pictures.lay_out(0, [chunk(9, (0, picture("b", 1))), chunk(3, (0, picture("c", 2)))])
    assert not first.is_picture.any() and not first.ahead.any()
