"""A last message that is continued: what is rendered ends where its text does, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashdraft.chat.templates import encode_chat
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

TEMPLATES = sorted((Path(__file__).parents[1] / "chat/renderings").glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LOOP = "{% for m in messages %}[{{ m.role }}]BODY[/]{% endfor %}[assistant]"


def rendered(template: str, content: Any, *before: dict[str, Any], **named: Any) -> str:
    tokenizer = Tokenizer(make_tiny_tokenizer(), special_tokens=TOKENS, chat_template=template)
    asked = before or ({"role": "user", "content": "Why?"},)
    messages = [*asked, {"role": "assistant", "content": content, **named}]
    ids = encode_chat(tokenizer, messages, continues_last=True)
    return tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("content", ["Because ", "", "a\n\n  b", "x" * 300, "end[/]", "{{ 1 }}\n"])
def test_the_text_ends_where_the_message_does(content: str) -> None:
    made = rendered(CHAT_TEMPLATE, content)
    assert made == f"<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n{content}"
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": content}]
    assert rendered(CHAT_TEMPLATE, parts).endswith(f"assistant\nOne.\n{content}")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_every_known_template_continues_or_says_why_not(template: Path) -> None:
    source = template.read_text(encoding="utf-8")
    for content in ("One\n two, ", "Yes"):
        is_twice = template.stem == "methods_and_filters" and " " not in content
        if is_twice:
            with pytest.raises(RequestError, match="drops or repeats"):
                rendered(source, content)
            continue
        assert rendered(source, content).endswith(content.rpartition("\n")[2])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{% if m.role == 'user' %}{{ m.content }}{% endif %}", "drops or repeats"),
        ("{{ m.content }}{{ m.content }}", "drops or repeats"),
        ("{{ m.content[:3] }}", "drops or repeats"),
        ("{{ m.content | upper }}", "drops or repeats"),
        ("{{ m.content | replace('e', 'a') }}", "drops or repeats"),
        ("{{ m.content | replace('B', 'b') }}", "changes the text"),
        ("{{ raise_exception('No answers.') if m.role == 'assistant' }}", "No answers"),
    ],
)
def test_a_template_that_cannot_is_refused_in_words(body: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        rendered(LOOP.replace("BODY", body), "Because e")


def test_thoughts_before_it_stay() -> None:
    template = LOOP.replace("BODY", "{{ m.reasoning_content }}|{{ m.content | trim }}")
    made = rendered(template, "  Because ", reasoning_content="hm")
    assert made.endswith("[assistant]hm|Because ")
