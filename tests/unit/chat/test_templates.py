"""Chat templates: the prompt text, checked against transformers, and refused messages."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from flashdraft.chat.templates import render_chat
from flashdraft.errors import CheckpointError, RequestError
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer

GEMMA4 = Path(__file__).parents[4] / "shared" / "data" / "gemma4" / "chat_template.jinja"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "Hi <b> & é\n"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Hello. "}, {"role": "user", "content": "🙂"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & here",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City", "enum": ["Łódź", "Paris"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Łódź"}}}
    ],
    "tool_responses": [{"name": "get_weather", "response": {"degrees": 21.5, "ok": True}}],
}


def tokenizer_with(template: str | None, **special_tokens: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    named = special_tokens or {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=named, chat_template=template)


def render(template: str, messages: Any = (USER,), **options: Any) -> str:
    return render_chat(tokenizer_with(template), list(messages), **options)


def transformers_render(
    template: str, special_tokens: dict[str, str], messages: Any, **options: Any
) -> str:
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(models.BPE())
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
    return reference.apply_chat_template(
        messages, tokenize=False, chat_template=template, **options
    )


def test_chatml() -> None:
    assert render(CHATML) == (
        "<|im_start|>user\nHi <b> & é\n</s>\n<|im_start|>assistant\n"  # nothing is escaped
    )
    assert not render(CHATML, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.weights
def test_smollm2_equals_transformers() -> None:
    tokenizer = Tokenizer.from_checkpoint(resolve_source("smollm2-135m").path)
    assert tokenizer is not None and tokenizer.chat_template is not None
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            assert render_chat(
                tokenizer, messages, add_generation_prompt=prompt
            ) == transformers_render(
                tokenizer.chat_template,
                tokenizer.special_tokens,
                messages,
                add_generation_prompt=prompt,
            )


@pytest.mark.skipif(not GEMMA4.is_file(), reason="the Gemma 4 template is not on this machine")
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_gemma4_equals_transformers(thinking: bool, tools: Any) -> None:
    template = GEMMA4.read_text(encoding="utf-8")
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
    for messages in [*CONVERSATIONS, [USER, CALL]]:
        ours = render_chat(
            tokenizer_with(template, **tokens),
            messages,
            tools=tools,
            extra={"enable_thinking": thinking},
        )
        assert ours == transformers_render(
            template,
            tokens,
            messages,
            tools=tools,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        assert ours.startswith("<bos><|turn>")


def test_helpers_templates_count_on() -> None:
    year = str(datetime.date.today().year)
    assert render("{{ strftime_now('%Y') }}") == year
    assert render("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert render("{{ {'b': 1} | tojson(indent=1) }}") == '{\n "b": 1\n}'
    assert render("{% for i in [1, 2] %}{% if i > 1 %}{% break %}{% endif %}x{% endfor %}") == "x"
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc") == "a\n  b\nc"
    assert render("{% generation %}{{ messages[0]['role'] }}{% endgeneration %}") == "user"
    assert render("{{ bos_token }}{{ pad_token }}{{ flag }}", extra={"flag": 1}) == "<s>1"


def test_tools_are_absent_unless_given() -> None:
    assert render("{{ 'with' if tools else 'without' }}") == "without"
    assert render("{{ 'with' if tools is none else 'x' }}", tools=[]) == "with"


def test_a_template_can_refuse() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1] }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__['os'] }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_templates_are_sandboxed(attack: str) -> None:
    with pytest.raises(RequestError, match="does not accept"):
        render(attack)


def test_a_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        render("ok\n{% if %}")


def test_no_template() -> None:
    with pytest.raises(RequestError, match="no chat template; use generate"):
        render_chat(tokenizer_with(None), [USER])


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0]['content'] }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_tool_call_arguments_become_objects() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": [1]}'}}],
    }
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v[0] }}{% endfor %}{% endfor %}"
        "|{{ m.content }}|{% endfor %}"
    )
    assert render(template, [message]) == "x:1||"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x": [1]}'  # the caller's stays


IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
CALLS = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("Hi", "non-empty list"),
        (["Hi"], r"messages\[0\].*object"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([USER, {"role": 3, "content": "x"}], r"messages\[1\]\.role is 3"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": 3}], r"content is 3"),
        ([{"role": "user", "content": [IMAGE]}], r"content\[0\] is at 'http://x', and nothing is"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'x'"),
        ([{**CALLS, "tool_calls": "f()"}], "tool_calls"),
        ([{**CALLS, "tool_calls": [{"name": "f"}]}], r"tool_calls\[0\] needs a function"),
        (
            [{**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "not valid JSON",
        ),
        (
            [{**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "JSON object",
        ),
    ],
)
def test_refused_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer_with(CHATML), messages)


def test_refused_tools() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        render(CHATML, tools=["get_weather"])
