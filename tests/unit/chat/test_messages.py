"""Messages in the form that templates want, and the sampling a checkpoint recommends."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from flashdraft.chat.sampling import sampling_defaults
from flashdraft.chat.templates import render_chat
from flashdraft.core import SamplingParams
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.chat_factory import GEMMA4_DATA

USER = {"role": "user", "content": "Hi"}
ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def run(template: str, messages: list[dict[str, Any]], **extra: Any) -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<bos>"}, chat_template=template)
    return render_chat(tokenizer, messages, extra=extra)


def test_developers_are_the_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    assert run(ROLES, messages) == "system:Be brief.;user:Hi;"
    knows = "{% if messages[0].role in ['system', 'developer'] %}{% endif %}" + ROLES
    assert run(knows, messages) == "developer:Be brief.;user:Hi;"
    assert messages[0]["role"] == "developer"  # the caller's stays


def test_fields_survive() -> None:
    messages = [
        USER,
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "x"},
    ]
    fields = "{{ m.reasoning_content }}{{ m.tool_call_id }}{{ m.name }};"
    template = "{% for m in messages %}" + fields + "{% endfor %}"
    assert run(template, messages) == ";hm;c1f;"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "tool_call_id": "c", "reasoning_content": "z"}, "has no content"),
        ({"role": "assistant", "tool_responses": 5}, r"tool_responses is 5; .* list of objects"),
        ({"role": "assistant", "tool_responses": ["x"]}, "list of objects"),
    ],
)
def test_wrong_results_are_refused_before_they_reach_a_template(
    message: dict[str, Any], words: str
) -> None:
    reads_results = "{% for m in messages %}{{ m.tool_responses }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(RequestError, match=words):
        run(reads_results, [USER, {"role": "assistant", "tool_calls": [call]}, message])


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_of_every_api(kind: str) -> None:
    parts = [{"type": kind, "text": "a"}, {"type": "text", "text": "b"}]
    assert run(ROLES, [{"role": "user", "content": parts}]) == "user:a\nb;"


PARTS = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
READS_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)
PRINTS_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0]['content'] | trim }}"
    "{% set messages = messages[1:] %}{% endif %}" + READS_PARTS
)


def test_parts_stay_parts_where_the_template_reads_them() -> None:
    assert run(READS_PARTS, [{"role": "user", "content": PARTS}]) == "user:onetwo;"
    assert PARTS[1]["type"] == "input_text"  # the caller's stays


def test_each_role_has_the_form_that_the_template_reads() -> None:
    messages = [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}]
    assert run(PRINTS_SYSTEM, messages) == "one\ntwouser:onetwo;"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content[0].text if messages[0].content is not string else 'x' }}",
        "{{ messages[0].content | tojson }}",
        "{% for p in messages[0].content %}{{ p }}{% endfor %}",
    ],
    ids=["the first alone", "as JSON", "in Python's spelling"],
)
def test_parts_that_the_template_would_lose_or_spell_out_are_joined(template: str) -> None:
    assert "text" not in run(template, [{"role": "user", "content": PARTS}])


def test_text_becomes_a_part_where_the_template_reads_nothing_else() -> None:
    only = "{% for m in messages %}{% for p in m.content %}{{ p['text'] }};{% endfor %}{% endfor %}"
    assert run(only, [USER]) == "Hi;"


CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "c2", "content": "two"},
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
]
FOLDS = (
    "{% for m in messages %}{{ m.role }}:{% for r in m.tool_responses or [] %}{{ r.name }}="
    "{{ r.response }},{% endfor %}{{ m.content }};{% endfor %}"
)


def test_tool_results_go_where_the_template_looks_for_them() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": CALLS}
    messages = [USER, call, *RESULTS]
    assert run(FOLDS, messages) == "user:Hi;assistant:g=two,f=one,;"
    answer = {"role": "assistant", "content": "Done."}
    assert run(FOLDS, [*messages, answer]) == "user:Hi;assistant:g=two,f=one,Done.;"
    assert run(FOLDS, [*messages, USER]) == "user:Hi;assistant:g=two,f=one,;user:Hi;"
    assert run(FOLDS, [*messages, call]) == "user:Hi;assistant:g=two,f=one,;assistant:;"
    reads = "{% if messages[0]['role'] == 'tool' %}{% endif %}" + FOLDS
    assert run(reads, messages) == "user:Hi;assistant:;tool:two;tool:one;"
    nameless = [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y", "name": "h"}]
    assert run(FOLDS, [USER, call, *nameless]) == "user:Hi;assistant:f=x,h=y,;"
    assert run(FOLDS, [USER, RESULTS[0]]) == "user:Hi;tool:two;"


TESTS_NONE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
    "{% if m.content is not none %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
SAYS_NOTHING = {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}


def test_content_that_is_null_stays_null() -> None:
    assert run(TESTS_NONE, [USER, SAYS_NOTHING]) == "user:Hi;<f>"
    assert run(TESTS_NONE, [USER, {**SAYS_NOTHING, "content": ""}]) == "user:Hi;<f>assistant:;"


def test_content_that_is_absent_stays_absent() -> None:
    absent = {name: value for name, value in SAYS_NOTHING.items() if name != "content"}
    defined = "{% for m in messages %}{{ m.content is defined }},{{ m.tool }}{% endfor %}"
    assert run(defined, [USER, absent]) == "True,False,"
    assert run(defined, [USER, SAYS_NOTHING]) == "True,True,"


@pytest.mark.parametrize(
    "said", ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content + '' }}"]
)
def test_null_is_the_empty_text_where_the_template_fails_or_prints_it(said: str) -> None:
    template = "{% for m in messages %}" + said + ";{% endfor %}"
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert run(template, [USER, thought]) == "Hi;;"
    knows_tools = "{{ tools }}" + template
    assert run(knows_tools, [USER, SAYS_NOTHING]) == "NoneHi;;"
    del thought["content"]
    assert run(template, [USER, thought]) == "Hi;;"


ODD = '{"b":1.50, "a" : [1e400,-0, 12345678901234567890], "t": "\\u00e9"}'
CALL_LOOP = "{% for m in messages[1:] %}{% for c in m.tool_calls %}"
TAKEN = {
    "text": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
    "text alone": "{{ '' + c.function.arguments }}",
    "printed": "{{ c.function.arguments }}",
    "as JSON": "{{ c.function.arguments | tojson }}",
    "within JSON": "{{ c.function | tojson }}",
    "each by itself": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "own form first": "{% set a = c.function.arguments %}{% if a is mapping %}"
    "{% for k, v in a | items %}{{ k }}:{{ v }},{% endfor %}{% else %}{{ a }}{% endif %}",
}
JSON = '{"b": 1.50, "a": [1e400, -0, 12345678901234567890], "t": "é"}'
WANTED = {
    "text": ODD,
    "text alone": ODD,
    "printed": ODD,
    "as JSON": JSON,
    "within JSON": '{"name": "f", "arguments": ' + JSON + "}",
    "each by itself": "b=1.50;a=[1e400, -0, 12345678901234567890];t=é;",
    "own form first": "b:1.50,a:[1e400, -0, 12345678901234567890],t:é,",
}


def call_with(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize("taken", TAKEN)
def test_arguments_keep_what_was_written(taken: str) -> None:
    template = CALL_LOOP + TAKEN[taken] + "{% endfor %}{% endfor %}"
    assert run(template, [USER, call_with(ODD)]) == WANTED[taken]


@pytest.mark.parametrize("taken", ["text alone", "printed"])
def test_objects_are_written_as_json_where_the_template_takes_text_alone(taken: str) -> None:
    template = CALL_LOOP + TAKEN[taken] + "{% endfor %}{% endfor %}"
    assert run(template, [USER, call_with({"x": [1.5, "é"]})]) == '{"x": [1.5, "é"]}'


def test_a_call_without_arguments_gets_none() -> None:
    template = CALL_LOOP + "{{ c.function.arguments is defined }}{% endfor %}{% endfor %}"
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    assert run(template, [USER, call]) == "False"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_every_name_that_templates_use(name: str) -> None:
    template = "{% for m in messages %}{{ m[wanted] }};{% endfor %}"
    said = {"role": "assistant", "content": "x", name: "hm"}
    for wanted in ("reasoning_content", "reasoning", "thinking"):
        assert run(template, [USER, said], wanted=wanted) == ";hm;"


@pytest.mark.skipif(not GEMMA4_DATA.is_dir(), reason="the Gemma 4 template is not on this machine")
def test_gemma4_tool_results() -> None:
    template = (GEMMA4_DATA / "chat_template.jinja").read_text(encoding="utf-8")
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}, RESULTS[1]]
    turn = (
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|tool_call>call:f{x:1}<tool_call|>"
        '<|tool_response>response:f{value:<|"|>one<|"|>}<tool_response|>'
    )
    thinking = "<bos><|turn>system\n<|think|><turn|>\n"
    assert run(template, messages) == turn + "<|channel>thought\n<channel|>"
    assert run(template, messages, enable_thinking=True) == thinking + turn.removeprefix("<bos>")


def test_recommended_sampling() -> None:
    gemma4 = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": 1}
    defaults = sampling_defaults(gemma4)
    assert defaults == {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    SamplingParams(**defaults)
    assert sampling_defaults({}) == {}
    assert sampling_defaults({"temperature": 0.6, "min_p": 0, "top_k": 20.0}) == {
        "temperature": 0.6,
        "min_p": 0,
        "top_k": 20,
    }
    assert sampling_defaults({"top_k": -1, "top_p": None}) == {"top_k": 0}


def test_without_sampling_it_is_greedy() -> None:
    config = {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    assert sampling_defaults(config) == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert sampling_defaults({"do_sample": False}) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", float("nan")),
        ("top_k", 2.5),
        ("top_k", -7),
        ("min_p", 3),
        ("repetition_penalty", 0),
    ],
)
def test_nonsense_is_passed_over_with_a_warning(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults({name: value, "min_p": 0.1} | {name: value}) == (
            {"min_p": 0.1} if name != "min_p" else {}
        )
    assert f"{name} is {value!r}" in caplog.text
