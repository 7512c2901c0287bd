"""The chat package against Gemma 4's own tokenizer and template, where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import Content, Reasoning, ToolCallArguments, join_deltas
from flashdraft.chat.answers.gemma4 import SPELLINGS
from flashdraft.chat.answers.marks import MarkKind
from flashdraft.chat.templates import render_chat
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.chat_factory import GEMMA4_DATA, TOOLS, pieces_of

pytestmark = pytest.mark.skipif(
    not GEMMA4_DATA.is_dir(), reason="Gemma 4's tokenizer is not on this machine"
)
USER = {"role": "user", "content": "Weather in Łódź?"}
ARGUMENTS = {
    "city": 'Łódź, "{x}" 🙂\n\t<b> call:f{} <|tool',
    "days": 12,
    "ratio": -0.125,
    "metric": False,
    "zip": None,
    "tags": ["a,b", "", "[c]"],
    "where": {"x": 1e-7, "name": "null"},
}


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    zstandard = pytest.importorskip("zstandard")
    folder: Path = tmp_path_factory.mktemp("gemma4")
    packed = (GEMMA4_DATA / "tokenizer.json.zst").read_bytes()
    text = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    (folder / "tokenizer.json").write_bytes(text)
    template = (GEMMA4_DATA / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    tokenizer = Tokenizer.from_checkpoint(folder)
    assert tokenizer is not None
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str | int]:
    """The pieces of an answer, token by token, as the engine makes them."""
    pieces: list[str | int] = []
    decoder = StreamDecoder(tokenizer)
    for index in ids:
        if index in tokenizer.special_ids:
            pieces += [decoder.flush(), index]
            decoder = StreamDecoder(tokenizer)
        else:
            pieces.append(decoder.push([index]))
    return [*pieces, decoder.flush()]


def test_the_marks_are_special_tokens(gemma4: Tokenizer) -> None:
    ids = {mark: gemma4.token_id(text) for mark, text in SPELLINGS.items()}
    assert ids == {
        MarkKind.THINK: 100,
        MarkKind.END_THINK: 101,
        MarkKind.CALL: 48,
        MarkKind.END_CALL: 49,
        MarkKind.QUOTE: 52,
    }
    assert set(ids.values()) <= gemma4.special_ids


def test_what_the_template_writes_is_read_back(gemma4: Tokenizer) -> None:
    """A call rendered as history, cut out and parsed as an answer, is the same call."""
    function: dict[str, Any] = {"name": "get_weather", "arguments": ARGUMENTS}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}] * 2}
    prompt = render_chat(gemma4, [USER], tools=TOOLS, extra={"enable_thinking": True})
    whole = render_chat(
        gemma4,
        [USER, call],
        tools=TOOLS,
        extra={"enable_thinking": True},
        add_generation_prompt=False,
    )
    answer = whole.removeprefix(prompt).removesuffix("<turn|>\n")
    assert whole.startswith(prompt) and answer.startswith("<|tool_call>")
    answer = "<|channel>thought\nI need <b>.\n<channel|>Let me see." + answer
    ids = gemma4.encode(answer)
    parser = AnswerFormat.of(gemma4).parser(gemma4.encode(prompt), TOOLS)
    deltas = [delta for piece in streamed(gemma4, ids) for delta in parser.push([piece])]
    deltas = join_deltas([*deltas, *parser.finish()])
    assert deltas[:2] == [Reasoning("I need <b>."), Content("Let me see.")]
    texts = [delta.text for delta in deltas if isinstance(delta, ToolCallArguments)]
    assert [json.loads(text) for text in texts] == [ARGUMENTS] * 2


def test_prompts_with_thinking_off_start_in_content(gemma4: Tokenizer) -> None:
    prompt = render_chat(gemma4, [USER])
    assert prompt.endswith("<|channel>thought\n<channel|>")
    parser = AnswerFormat.of(gemma4).parser(gemma4.encode(prompt), None)
    assert parser.push(["Hi"]) == [Content("Hi")]
    open_prompt = gemma4.encode(prompt.removesuffix("<channel|>"))
    assert AnswerFormat.of(gemma4).parser(open_prompt, None).push(["Hi"]) == [Reasoning("Hi")]


def test_its_grammar_takes_what_the_template_writes(gemma4: Tokenizer) -> None:
    llguidance = pytest.importorskip("llguidance")
    library = llguidance.LLTokenizer(gemma4.to_json(), eos_token=[1, 106])
    spec = AnswerFormat.of(gemma4).tool_grammar(TOOLS, "get_weather", True)
    source = llguidance.LLMatcher.grammar_from_lark(spec.text)
    good = '<|tool_call>call:get_weather{city:<|"|>Łódź 🙂<|"|>,days:3}<tool_call|>'
    for text, fits in ((good, True), (good * 2, False), (good.replace("days:3", "days:x"), False)):
        matcher = llguidance.LLMatcher(library, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = gemma4.encode(text)
        taken = matcher.try_consume_tokens(ids)
        assert (taken == len(ids) and matcher.is_accepting()) == fits, text
    assert pieces_of(gemma4, good)[0] == 48
