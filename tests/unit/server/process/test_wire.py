"""The wire: whatever crosses it comes out as it went in, and garbage is told apart."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest

from flashdraft.core import (
    FinishReason,
    Generation,
    GenerationStats,
    GrammarSpec,
    Picture,
    PlacedPicture,
    Request,
    SamplingParams,
    ShownTree,
    StepStats,
    TokenEvent,
    TokenLogprob,
)
from flashdraft.errors import RequestError
from flashdraft.killable import frames
from flashdraft.killable.frames import FrameReader, WireError
from flashdraft.server.process import wire
from flashdraft.server.process.wire import History

TEXTS = ("", "plain", "ä 🙂 \u2028", 'quote " \\ \n\x00', "lone \ud800 surrogate")


def through_json(content: dict[str, Any]) -> dict[str, Any]:
    """As the other end sees it."""
    (message,) = FrameReader().feed(frames.pack({"type": "x", **content}))
    del message["type"]
    return message


def random_request(rng: random.Random) -> Request:
    params = SamplingParams(
        max_tokens=rng.randint(1, 10**6),
        temperature=rng.random(),
        top_p=rng.uniform(0.01, 1),
        top_k=rng.randint(0, 100),
        min_p=rng.random(),
        repetition_penalty=rng.uniform(0.5, 2),
        presence_penalty=rng.uniform(-2, 2),
        frequency_penalty=rng.uniform(-2, 2),
        logit_bias={
            rng.randint(0, 10**6): rng.uniform(-100, 100) for _ in range(rng.randint(0, 5))
        },
        min_tokens=rng.randint(0, 1),
        seed=rng.choice([None, -(2**63), 2**63 - 1]),
        stop=tuple(text for text in TEXTS if text and rng.random() < 0.5),
        stop_token_ids=tuple(rng.randint(0, 99) for _ in range(rng.randint(0, 3))),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 20]),
    )
    return Request(
        id=rng.choice(TEXTS),
        prompt_ids=[rng.randint(0, 10**6) for _ in range(rng.randint(0, 50))],
        params=params,
        seed=rng.getrandbits(62),
        verify=rng.choice([None, 0, 15]),
        grammar=rng.choice([None, GrammarSpec("regex", "a+"), GrammarSpec("json_object", "")]),
        prompt_logprobs=rng.choice([None, 5]),
        shows_trees=rng.random() < 0.5,
    )


def random_logprob(rng: random.Random) -> TokenLogprob:
    values = (rng.uniform(-20, 0), -math.inf, 0.0)
    top = tuple((rng.randint(0, 99), rng.choice(values)) for _ in range(rng.randint(0, 3)))
    return TokenLogprob(rng.choice(values), top)


def random_events(rng: random.Random) -> list[TokenEvent]:
    """The events of one request, the last one with everything the earlier ones said."""
    has_logprobs = rng.random() < 0.5
    events: list[TokenEvent] = []
    tokens: list[int] = []
    drafted: list[bool] = []
    logprobs: list[TokenLogprob] = []
    for index in range(count := rng.randint(1, 5)):
        new = [rng.randint(0, 10**6) for _ in range(rng.randint(0, 4))]
        flags = [rng.random() < 0.5 for _ in new]
        likely = [random_logprob(rng) for _ in new]
        tokens, drafted, logprobs = tokens + new, drafted + flags, logprobs + likely
        generation = None
        if index == count - 1:
            stats = GenerationStats(
                prompt_tokens=3,
                histogram={rng.randint(1, 16): rng.randint(1, 9)},
                ttft_s=rng.choice([0.25, math.inf]),
            )
            generation = Generation(
                text=rng.choice(TEXTS),
                token_ids=tokens,
                finish_reason=rng.choice(list(FinishReason)),
                stats=stats,
                logprobs=logprobs if has_logprobs else None,
                drafted=drafted,
                error=rng.choice([None, "It broke."]),
                prompt_logprobs=rng.choice([None, [None, random_logprob(rng)]]),
            )
        events.append(
            TokenEvent(
                request_id="r",
                token_ids=tuple(new),
                text=rng.choice(TEXTS),
                drafted=tuple(flags),
                logprobs=tuple(likely) if has_logprobs else None,
                generation=generation,
                pieces=rng.choice([(), ("a", 7, "b"), (5,)]),
                trees=rng.choice([(), (ShownTree(0, (5, 6, 7), (0, 0, 2), (2, 3)),)]),
            )
        )
    return events


@pytest.mark.parametrize("seed", range(50))
def test_requests_come_back(seed: int) -> None:
    request = random_request(random.Random(seed))
    assert wire.request_from_dict(through_json(wire.request_to_dict(request))) == request


@pytest.mark.parametrize("seed", range(50))
def test_events_come_back(seed: int) -> None:
    history = History()
    for event in random_events(random.Random(seed)):
        back = wire.event_from_dict(through_json(wire.event_to_dict(event)))
        assert history.complete(back) == event


def test_the_last_event_does_not_repeat_the_answer() -> None:
    tokens = list(range(1000))
    generation = Generation("", tokens, FinishReason.STOP, GenerationStats(), drafted=[True] * 1000)
    event = TokenEvent("r", (1,), "", (True,), generation=generation)
    assert len(json.dumps(wire.event_to_dict(event))) < 1000


def test_nan_comes_back() -> None:
    logprob = TokenLogprob(math.nan, ((1, math.inf),))
    event = TokenEvent("r", (1,), "a", (False,), (logprob,))
    (back,) = wire.event_from_dict(through_json(wire.event_to_dict(event))).logprobs or ()
    assert math.isnan(back.logprob) and back.top == ((1, math.inf),)


def test_steps_come_back() -> None:
    stats = StepStats(2, 5, 7, 3, (4, 0), 0.5, math.nan, 0.0, depths=(3, 0), num_branches=1)
    back = wire.step_from_dict(through_json(wire.step_to_dict(stats)))
    assert math.isnan(back.verify_s)
    back.verify_s = stats.verify_s = 0.0
    assert back == stats


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_frames_are_found_however_the_stream_is_cut(size: int) -> None:
    messages = [{"type": "a", "n": n, "text": TEXTS[n % len(TEXTS)] * n} for n in range(20)]
    stream = b"".join(frames.pack(message) for message in messages)
    reader = FrameReader()
    cuts = range(0, len(stream), size)
    assert [m for i in cuts for m in reader.feed(stream[i : i + size])] == messages


@pytest.mark.parametrize(
    "body",
    [b"", b"nonsense", b"[1]", b"{}", b'{"type": 1}', b"\xff\xfe", b"[" * 200_000, b'{"type":"a"'],
)
def test_garbage_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        list(FrameReader().feed(frames.HEADER.pack(len(body)) + body))


def test_a_frame_beyond_the_cap_is_refused_before_it_arrives() -> None:
    with pytest.raises(WireError, match="announces"):
        list(FrameReader().feed(frames.HEADER.pack(frames.MAX_FRAME_BYTES + 1)))


def test_a_message_beyond_the_cap_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="holds 100"):
        frames.pack({"type": "x", "text": "a" * 100})


def make_picture(seed: int, width: int, height: int) -> Picture:
    rng = random.Random(seed)
    return Picture(rng.randbytes(3 * width * height), width, height, 4, rng.randbytes(32))


def test_a_request_comes_back_with_its_pictures() -> None:
    one, other = make_picture(0, 6, 4), make_picture(1, 50, 90)
    request = dataclasses.replace(
        random_request(random.Random(3)),
        pictures=(PlacedPicture(1, one), PlacedPicture(7, other), PlacedPicture(20, one)),
    )
    stream = b"".join(frames.pack(*submission) for submission in wire.submissions(request))
    assert len(stream) < len(one.pixels) + len(other.pixels) + 4000  # each once, and as it is
    reader, messages = FrameReader(), list[dict[str, Any]]()
    for begin in range(0, len(stream), 1000):
        messages += reader.feed(stream[begin : begin + 1000])
    assert [message["type"] for message in messages] == ["picture", "picture", "submit"]
    pictures = [wire.picture_from_dict(message) for message in messages[:2]]
    assert pictures == [one, other]
    content = messages[-1]["request"]
    assert wire.request_from_dict(content, {one.key: one for one in pictures}) == request
    with pytest.raises(WireError):
        wire.request_from_dict(content, {one.key: one})


def test_a_picture_of_another_size_is_a_wire_error() -> None:
    picture = make_picture(0, 6, 4)
    request = dataclasses.replace(
        random_request(random.Random(3)), pictures=(PlacedPicture(1, picture),)
    )
    (message, data), _ = wire.submissions(request)
    whole = {**message, "data": data}
    assert wire.picture_from_dict(whole) == picture
    for wrong in ({"width": 7}, {"key": "x"}, {"data": None}, {"height": None}):
        with pytest.raises(WireError):
            wire.picture_from_dict({**whole, **wrong})


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff{}", bytes(range(256)) * 40])
def test_bytes_go_with_a_message_as_they_are(data: bytes) -> None:
    stream = frames.pack({"type": "a", "n": 1}, data) + frames.pack({"type": "b"})
    assert list(FrameReader().feed(stream)) == [{"type": "a", "n": 1, "data": data}, {"type": "b"}]


@pytest.mark.parametrize("body", [b"\0", b"\0\0\0\0\x05{}", b"\0\xff\xff\xff\xff{}", b"\0" * 9])
def test_garbage_before_bytes_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        list(FrameReader().feed(frames.HEADER.pack(len(body)) + body))


def test_every_missing_or_wrong_field_is_a_wire_error() -> None:
    whole = wire.request_to_dict(random_request(random.Random(0)))
    event = wire.event_to_dict(random_events(random.Random(1))[-1])
    for read, content, optional in (
        (wire.request_from_dict, whole, set[str]()),
        (wire.event_from_dict, event, {"logprobs", "generation"}),
        (wire.step_from_dict, wire.step_to_dict(StepStats()), set(wire.step_to_dict(StepStats()))),
    ):
        for name in content.keys() - optional:
            with pytest.raises(WireError):
                read({key: value for key, value in content.items() if key != name})
    for name in ("id", "tokens", "text", "drafted"):
        with pytest.raises(WireError):
            wire.event_from_dict({**event, name: None})
    with pytest.raises(WireError):
        wire.step_from_dict({"verify_lengths": [], "surprise": 1})


def test_wrong_settings_are_the_requests_own_fault() -> None:
    content = wire.request_to_dict(random_request(random.Random(0)))
    content["params"]["temperature"] = -1
    with pytest.raises(RequestError, match="temperature"):
        wire.request_from_dict(content)
