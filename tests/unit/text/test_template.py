"""Templates that try to use up the machine are stopped, and others run unharmed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from flashdraft.chat.templates import render_chat
from flashdraft.errors import CheckpointError, RequestError
from flashdraft.models import tokenizer as tokenizer_module
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.text.protocol import MAX_CHARS
from tests.unit.text.template_bombs import FREEZERS, LOOP, SIZE_BOMBS, TIME_BOMBS

pytestmark = pytest.mark.alone  # limits in wall time, of several processes

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "bomb" in request.fixturenames:
        monkeypatch.setattr(tokenizer_module, "_TEXT_CPU_S", 0.3)


def with_template(template: str) -> Tokenizer:
    return Tokenizer(
        tokenizers.Tokenizer(models.BPE()),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=template,
    )


def run(template: str, **options: Any) -> str:
    messages = options.pop("messages", [USER])
    return render_chat(with_template(template), messages, **options)


@pytest.mark.parametrize("bomb", TIME_BOMBS)
def test_time_bombs(bomb: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match="chat template was stopped: it ran|does not accept"):
        run(bomb)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("bomb", SIZE_BOMBS)
def test_size_bombs(bomb: str) -> None:
    """Stopped or refused; the few that are small enough for a process give what they make."""
    begin = time.monotonic()
    try:
        assert len(run(bomb)) <= MAX_CHARS
    except RequestError as error:
        assert "was stopped" in str(error) or "does not accept" in str(error)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("bomb", FREEZERS)
def test_one_long_call_of_the_interpreter_is_stopped(bomb: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match="was stopped|does not accept"):
        run(bomb)
    assert time.monotonic() - begin < 10


def test_limits_are_said() -> None:
    with pytest.raises(RequestError, match="stopped: it ran for more than 2 s. Send a shorter"):
        run(LOOP.replace("BODY", ""))
    with pytest.raises(RequestError, match="stopped: it makes text of more than 8000000 char"):
        run("{{ 'x' * 8000001 }}")
    assert len(run("{{ 'x' * 8000000 }}")) == MAX_CHARS
    with pytest.raises(RequestError, match="stopped: it needed more than 256 MiB of memory"):
        run("{% set x = [0] * 999999999 %}")


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
    assert len(run(template, messages=messages)) == 2000 * 3007


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
