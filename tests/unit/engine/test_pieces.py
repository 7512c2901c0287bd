"""`TokenEvent.pieces`: special tokens in their places, however the stream was cut into steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flashdraft.core import FinishReason, Request, SamplingParams, TokenEvent
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.output import TextOutput
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer
from tests import zoo
from tests.tiny import make_byte_fallback_tokenizer, make_tiny_tokenizer

MARK = 1  # a special token's id in both tokenizers


TOKENIZERS = {
    "bytes": Tokenizer(make_tiny_tokenizer()),
    "fallback": Tokenizer(make_byte_fallback_tokenizer()),
}


def merged(pieces: Sequence[str | int]) -> list[str | int]:
    """Neighbouring strings as one."""
    result: list[str | int] = []
    for piece in pieces:
        if isinstance(piece, str) and result and isinstance(result[-1], str):
            result[-1] += piece
        elif piece != "":
            result.append(piece)
    return result


def text_of(pieces: Sequence[str | int]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], steps: random.Random | None
) -> tuple[list[str | int], str]:
    """All pieces, taken after every token or after steps of random size, and the text."""
    output, pieces = TextOutput(StreamDecoder(tokenizer), stops), []
    for token in ids:
        ended = output.push(token)
        if steps is None or steps.random() < 0.4:
            shown = output.take()
            assert text_of(shown.pieces) == shown.text
            pieces += shown.pieces
        if ended:
            break
    output.finish()
    pieces += output.take().pieces
    assert text_of(pieces) == output.text
    return merged(pieces), output.text


def text_before(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> str:
    """The text as it is without any notion of pieces."""
    decoder, text = StreamDecoder(tokenizer), ""
    for piece in [*(decoder.push([token]) for token in ids), decoder.flush()]:
        text += piece
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)]
    return text


def random_ids(tokenizer: Tokenizer, source: random.Random) -> list[int]:
    """Words, characters cut in half, lone bytes, and special tokens between any two of them."""
    ids: list[int] = []
    for _ in range(source.randint(1, 12)):
        kind = source.random()
        if kind < 0.3:
            ids.append(MARK)
        elif kind < 0.5:
            ids.append(source.randrange(tokenizer.vocab_size))
        else:
            ids += tokenizer.encode(
                "".join(source.choices(["a", "b", "E", "N", "D", "é", "🙂"], k=2))
            )
    for _ in range(source.randint(0, 2)):
        ids.insert(source.randrange(len(ids) + 1), MARK)
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_do_not_depend_on_the_steps_and_the_text_is_what_it_was(name: str) -> None:
    tokenizer, num_marks, num_stopped = TOKENIZERS[name], 0, 0
    for seed in range(1500):
        source = random.Random(seed)
        ids = random_ids(tokenizer, source)
        stops = source.choice([[], ["END"], ["ab", "E"], ["é", "ND", "🙂a"]])
        pieces, text = stream(tokenizer, ids, stops, None)
        assert text == text_before(tokenizer, ids, stops)
        for cut in range(4):
            assert stream(tokenizer, ids, stops, random.Random(cut)) == (pieces, text)
        marks = [piece for piece in pieces if isinstance(piece, int)]
        special = [token for token in ids if token in tokenizer.special_ids]
        assert marks == special[: len(marks)]
        if not stops:
            assert marks == special
            assert text == tokenizer.decode(ids)
        num_marks += len(marks)
        num_stopped += len(marks) < len(special)
    assert num_marks > 1000 and num_stopped > 100


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_special_token_stands_between_the_texts_around_it(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    first, second = tokenizer.encode("ab"), tokenizer.encode("é🙂")
    for ids, expected in (
        ([MARK, *first, MARK, MARK, *second, MARK], [MARK, "ab", MARK, MARK, "é🙂", MARK]),
        ([*second, MARK, *first], ["é🙂", MARK, "ab"]),
        ([MARK], [MARK]),
        ([*second[:1], MARK, *second[1:]], ["é", MARK, "🙂"]),  # inside a character: behind it
        ([*second[:-1], MARK, *second[-1:], *first], ["é🙂", MARK, "ab"]),
        ([*second[:-1], MARK], ["é\ufffd", MARK]),
    ):
        pieces, _ = stream(tokenizer, ids, [], None)
        if name == "fallback" and expected[0] == "é\ufffd":  # one for each byte
            expected = ["\ufffd" * 5, MARK]
        assert pieces == expected, ids


def test_a_stop_string_holds_back_the_special_tokens_behind_it() -> None:
    tokenizer = TOKENIZERS["fallback"]
    e, n, d, a = (tokenizer.encode(letter)[0] for letter in "ENDa")
    output = TextOutput(StreamDecoder(tokenizer), ["END"])
    shown = []
    for token in (a, MARK, e, MARK, n, MARK):
        output.push(token)
        shown.append(output.take().pieces)
    assert shown == [("a",), (MARK,), (), (), (), ()]
    assert output.push(d)
    assert output.take() == ("", ()), "they stood inside the stop string"
    other = TextOutput(StreamDecoder(tokenizer), ["END"])
    for token in (e, MARK, n, MARK, a):
        other.push(token)
    assert other.take().pieces == ("E", MARK, "N", MARK, "a"), "it was no stop string after all"


def test_events_carry_pieces_without_the_stop_token() -> None:
    target = zoo.tiny_target("llama", zoo.kernels("float32"))
    tokenizer = TOKENIZERS["fallback"]
    params = SamplingParams(max_tokens=40, temperature=1.0, logit_bias={MARK: 4.0, 2: 2.0})
    requests = [Request(f"r{i}", [5 + i, 9], params, seed=i) for i in range(6)]

    def pieces_of(config: EngineConfig) -> dict[str, list[str | int]]:
        engine = Engine(target, None, config, lambda: StreamDecoder(tokenizer))
        for request in requests:
            engine.submit(request)
        events: list[TokenEvent] = []
        while engine.has_work:
            events += engine.step()
        found: dict[str, list[str | int]] = {request.id: [] for request in requests}
        for event in events:
            assert text_of(event.pieces) == event.text
            found[event.request_id] += event.pieces
        for event in events:
            if event.generation is not None:
                ids = event.generation.token_ids
                ended = event.generation.finish_reason is FinishReason.STOP
                special = [i for i in ids[: len(ids) - ended] if i in tokenizer.special_ids]
                assert [p for p in found[event.request_id] if isinstance(p, int)] == special
        return {key: merged(pieces) for key, pieces in found.items()}

    plain = pieces_of(EngineConfig(verify=0, ngram=False, cache=CacheOptions(cache_gb=0.01)))
    assert pieces_of(EngineConfig(verify=7, cache=CacheOptions(cache_gb=0.01))) == plain
    assert sum(piece == MARK for pieces in plain.values() for piece in pieces) > 5
