"""Templates that try to use up the machine are stopped, in a thread, and others run unharmed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from flashdraft.chat.template_meter import TemplateLimits
from flashdraft.chat.templates import render_chat
from flashdraft.errors import CheckpointError, RequestError
from flashdraft.models.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
SHORT = TemplateLimits(time_s=0.2, max_chars=100_000)


def run(template: str, limits: TemplateLimits = SHORT, **options: Any) -> str:
    tokenizer = Tokenizer(
        tokenizers.Tokenizer(models.BPE()),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=template,
    )
    messages = options.pop("messages", [USER])
    return render_chat(tokenizer, messages, limits=limits, **options)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"
)


def doubling(start: str, step: str, then: str = "") -> str:
    return DOUBLE.replace("START", start).replace("STEP", step) + then


@pytest.mark.parametrize(
    "bomb",
    [
        LOOP.replace("BODY", ""),
        LOOP.replace("BODY", "{% if false %}x{% endif %}"),
        LOOP.replace("BODY", "{% set x = a %}"),
        "{% macro f(n) %}{{ f(n) if n else f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [messages] recursive %}{{ loop([messages]) }}{% endfor %}",
        "{{ range(99999) | map('string') | map('upper') | map('lower') | list | length }}" * 50,
        "{% for i in range(9999) %}{{ range(99999) | list | sort | length }}{% endfor %}",
    ],
)
def test_time_bombs(bomb: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match="chat template was stopped: it ran|does not accept"):
        run(bomb)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'x' * 999999999 }}",
        "{% set x = 999999999 * 'x' %}",
        "{% set x = [0] * 999999999 %}",
        "{% set x = ('x' * 99999) * 99999 %}",
        "{% set x = 9 ** 999999999 %}",
        doubling("9", "ns.x * ns.x"),
        doubling("9", "ns.x ** 99"),
        doubling("'x'", "ns.x + ns.x"),
        doubling("'x'", "ns.x ~ ns.x"),
        doubling("[1]", "ns.x + ns.x"),
        doubling("'xy'", "ns.x | replace('x', ns.x)"),
        doubling("'xy'", "ns.x.replace('x', ns.x)"),
        doubling("'x'", "[ns.x, ns.x] | join"),
        doubling("'x'", "''.join([ns.x, ns.x])"),
        doubling("'x'", "[ns.x, ns.x] | map('string') | join"),
        doubling("'x'", "''.join([ns.x, ns.x] | map('string'))"),
        doubling("'xy'", "ns.x | replace(new=ns.x, old='x')"),
        doubling("'xy'", "ns.x | replace('x', [ns.x])"),
        doubling("'xy'", "[1, 2, 3] | join([ns.x]) | string"),
        doubling("'x'", "'%s%s' % (ns.x, ns.x)"),
        doubling("'x'", "'%s%s' | format(ns.x, ns.x)"),
        doubling("'x'", "'{0}{0}'.format(ns.x)"),
        doubling("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
        doubling("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
        doubling("[1]", "[ns.x, ns.x]", "{{ ns.x | string | length }}"),
        doubling("[1]", "{'a': ns.x, 'b': ns.x}", "{% set y = ns.x ~ 'x' %}"),
        doubling("[1]", "dict(a=ns.x, b=ns.x)", "{{ '%s' % [ns.x] }}"),
        "{{ 'x' | center(999999999) }}",
        "{{ 'x'.center(999999999) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x'.zfill(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'x\n' | indent(999999999) }}",
        "{{ ('\n' * 9999) | indent(9999) }}",
        "{{ [1] | tojson(indent=999999999) }}",
        "{{ [1] | batch(999999999, 0) | list }}",
        "{{ [1] | slice(999999999) | list }}",
        "{{ strftime_now('%99999999d') }}",
        "{{ [[1], [2]] | sum(start=[]) }}",
        "{{ 'x'.encode() }}",
        "{{ 'x'.translate({120: 'y'}) }}",
        "{{ '\t'.expandtabs(999999999) }}",
        "{{ (5).to_bytes(999999999) }}",
        "{% set s = 'x' * 99999 %}{% for i in range(9999) %}{% set t = s[1:] %}{% endfor %}",
        "{% set s = [0] * 99999 %}{% for i in range(9999) %}{% set t = s.copy() %}{% endfor %}",
        "{% set s = 'x' * 99999 %}{% for i in range(9999) %}{% set t = s.lower() %}{% endfor %}",
        "{{ lipsum(999999) }}",
        "{{ range(9999999) }}",
        "{% for i in range(20000) %}{{ 'xxxxxxxxxx' }}{% endfor %}",
        "{% set x %}{% for i in range(20000) %}{{ 'xxxxxxxxxx' }}{% endfor %}{% endset %}",
        "{% macro f() %}{% for i in range(20000) %}xxxxxxxxxx{% endfor %}{% endmacro %}{{ f()[0]}}",
    ],
)
def test_size_bombs(bomb: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match="was stopped|does not accept"):
        run(bomb, TemplateLimits(max_chars=100_000))
    assert time.monotonic() - begin < 10


def test_limits_are_said() -> None:
    with pytest.raises(RequestError, match="stopped: it ran for more than 0.2 s. Send a shorter"):
        run(LOOP.replace("BODY", ""))
    with pytest.raises(RequestError, match="stopped: it makes text of more than 100000 char"):
        run("{{ 'x' * 100001 }}")
    assert len(run("{{ 'x' * 100000 }}")) == 100_000


def test_a_stopped_thread_stops_no_other() -> None:
    """Both in threads of one process, at once: one is stopped, one renders."""
    outcomes: dict[str, str] = {}

    def work(name: str, template: str) -> None:
        try:
            outcomes[name] = run(template)
        except RequestError as error:
            outcomes[name] = str(error)

    bomb = LOOP.replace("BODY", "")
    fair = "{% for i in range(100) %}{{ messages[0].content }}{% endfor %}"
    threads = [
        threading.Thread(target=work, args=job)
        for job in (("bomb", bomb), ("fair", fair), ("other bomb", bomb))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert outcomes["fair"] == "Hi" * 100
    assert "stopped" in outcomes["bomb"] and "stopped" in outcomes["other bomb"]


@pytest.mark.parametrize(
    ("template", "output"),
    [
        ("{{ 'a' ~ 1 ~ [2] ~ none }}", "a1[2]None"),
        ("{{ 'a' + 'b' }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ 3 * 4 }}",
         "ababab[1, 2]1024112"),
        ("{{ '%s-%05d' % ('20240101', 42) }}{{ '%s' | format(123456789) }}",
         "20240101-00042123456789"),
        ("{{ 'Date: 20240101 {}'.format(123456) }}", "Date: 20240101 123456"),
        ("{{ [1, 2] | join(', ') }}{{ ['a', 'b'] | map('upper') | join }}", "1, 2AB"),
        ("{{ ', '.join(['a', 'b']) }}{{ 'x'.replace('x', 'y') }}", "a, by"),
        ("{{ [1, 2] | sum }}{{ [{'n': 1}] | sum(attribute='n') }}", "31"),
        ("{{ 'a\nb' | indent(2) }}{{ [1] | tojson(indent=1) }}", "a\n  b[\n 1\n]"),
        ("{% macro f(x) %}<{{ x }}>{{ caller() if caller }}{% endmacro %}{{ f(123456789) }}"
         "{% call f(1) %}in{% endcall %}", "<123456789><1>in"),
        ("{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }};{% endfor %}",
         "1;2;;;3;"),
        ("{% for x in range(5) if x is odd %}{{ loop.index }}{% else %}none{% endfor %}", "12"),
        ("{{ [3, 1] | sort | first }}{{ 'x' | default('y') }}{{ {'b': 1} | dictsort }}",
         "1x[('b', 1)]"),
        ("{{ dict(a=1).a }}{{ {'a': 1}.items() | list }}", "1[('a', 1)]"),
        ("{{ 'abc'[1:] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[-1] }}{{ 'abc'[:2] | upper }}",
         "bc[3, 2, 1]cAB"),
        ("{{ 'xy' | replace('x', 1) }}{{ 'xx' | replace('x', 'y', 1) }}", "1yyx"),
        ("{{ undefined_name }}{{ none }}{{ 'a  b'.split() }}", "None['a', 'b']"),
    ],
)  # fmt: skip
def test_what_templates_do_still_works(template: str, output: str) -> None:
    assert run(template) == output


def test_a_big_conversation_passes() -> None:
    messages = [{"role": "user", "content": "x" * 3000}] * 2000
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim ~ '\n' }}{% endfor %}"
    )
    assert len(run(template, TemplateLimits(), messages=messages)) == 2000 * 3007


def test_hopeless_templates_are_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="524289 characters; at most 524288"):
        run("x" * (512 * 1024 + 1))
    with pytest.raises(CheckpointError, match="nested too deeply"):
        run("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "x_token"]
)
def test_reserved_switches(name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is reserved"):
        run("{{ 1 }}", extra={name: "x"})


def test_switches_by_list() -> None:
    extra = {"enable_thinking": True}
    assert run("{{ enable_thinking }}", extra=extra) == "True"
    assert run("{{ enable_thinking }}", extra=extra, allowed=("enable_thinking",)) == "True"
    with pytest.raises(RequestError, match="'enable_thinking' is not allowed; allowed are: a, b"):
        run("{{ 1 }}", extra=extra, allowed=("b", "a"))
    with pytest.raises(RequestError, match="allowed are: none"):
        run("{{ 1 }}", extra=extra, allowed=())
