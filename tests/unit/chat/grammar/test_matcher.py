"""The law under a grammar: a mask depends on the tokens before it alone, however they were tried.

Drafted and plain answers draw from the same rows under the same masks, so they are distributed
alike. Which tokens a mask has is the library's: of a text that must come, the tokenizer's own cut.
"""

from __future__ import annotations

import json
import random

import pytest

from flashdraft.chat.grammar.compiler import LlguidanceCompiler
from flashdraft.chat.grammar.matcher import LlguidanceMatcher
from flashdraft.core import GrammarSpec
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import END_OF_TURN, VOCAB_SIZE, make_tiny_tokenizer

TINY = Tokenizer(make_tiny_tokenizer())
COMPILE = LlguidanceCompiler(TINY, VOCAB_SIZE, [END_OF_TURN])
SCHEMA = {
    "type": "object",
    "properties": {
        "the quick brown": {"enum": ["the fox", "the dog", "another"]},
        "tokens": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["the quick brown", "tokens"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec("json_schema", json.dumps(SCHEMA)),
    GrammarSpec("choice", json.dumps(["the quick brown fox", "the quiet tree", "another"])),
    GrammarSpec("regex", "(the|then|thinks)+ (lazy){2,3}[a-z]*"),
    GrammarSpec("lark", 'start: "the quick " <[1]> /[a-z ]+/ "!"'),
]


def allowed(matcher: LlguidanceMatcher) -> list[int]:
    mask = matcher.allowed()
    return [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_mask_depends_on_the_tokens_alone(spec: GrammarSpec) -> None:
    grammar = COMPILE(spec)
    for seed in range(6):
        dice = random.Random(seed)
        matcher, history = grammar.start(), []
        for _ in range(25):
            may_come = allowed(matcher)
            num_tried = 0
            for _ in range(dice.randrange(6)):  # a draft, some of it right, taken back
                tries = allowed(matcher) if dice.random() < 0.8 else list(range(VOCAB_SIZE))
                if tries and matcher.advance(dice.choice(tries)):
                    num_tried += 1
                    matcher.forced()
            matcher.rollback(num_tried)
            fresh = grammar.start()
            assert all(map(fresh.advance, history))
            assert allowed(matcher) == may_come == allowed(fresh)
            assert matcher.may_end() == fresh.may_end()
            if not may_come:
                break
            history.append(dice.choice(may_come))
            assert matcher.advance(history[-1])
        assert len(history) > 2


def test_a_text_that_must_come_has_the_tokenizers_own_cut() -> None:
    matcher = COMPILE(GrammarSpec("choice", json.dumps(["the quick brown fox"]))).start()
    cut = TINY.encode("the quick brown fox")
    assert matcher.forced() == cut
    for token in cut:
        assert allowed(matcher) == [token]
        assert matcher.advance(token)
    # where there is a choice every cut is allowed, and the rest follows from the one taken
    matcher = COMPILE(GrammarSpec("choice", json.dumps(["the quick", "another"]))).start()
    assert {TINY.decode([token]) for token in allowed(matcher)} == {"a", "an", "t", "th", "the"}
    assert matcher.advance(TINY.encode("t")[0])
    assert [TINY.decode([token]) for token in allowed(matcher)] == ["h"]
