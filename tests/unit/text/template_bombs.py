"""Templates that try to use up the machine, or to stop the program that renders them."""

from __future__ import annotations

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"
)


def doubling(start: str, step: str, then: str = "") -> str:
    return DOUBLE.replace("START", start).replace("STEP", step) + then


TIME_BOMBS = [
    LOOP.replace("BODY", ""),
    LOOP.replace("BODY", "{% if false %}x{% endif %}"),
    LOOP.replace("BODY", "{% set x = a %}"),
    "{% macro f(n) %}{{ f(n) if n else f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [messages] recursive %}{{ loop([messages]) }}{% endfor %}",
    "{{ range(99999) | map('string') | map('upper') | map('lower') | list | length }}" * 50,
    "{% for i in range(9999) %}{{ range(99999) | list | sort | length }}{% endfor %}",
]

SIZE_BOMBS = [
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
]

# Two structures of 2 ** 40 leaves that share their halves: comparing, hashing, sorting or writing
# them is one call of the interpreter, and no code of ours runs before it ends.
_PAIR = (
    "{% set ns = namespace(a=[0], b=[0], t=(0,), u=(0,), d={'k': 0}, e={'k': 0}) %}"
    "{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"
    "{% set ns.t = (ns.t, ns.t) %}{% set ns.u = (ns.u, ns.u) %}"
    "{% set ns.d = {'k': ns.d, 'l': ns.d} %}{% set ns.e = {'k': ns.e, 'l': ns.e} %}{% endfor %}"
)
_TAILS = [
    "{% if ns.a == ns.b %}x{% endif %}",
    "{% if ns.a != ns.b %}x{% endif %}",
    "{% if ns.a < ns.b %}x{% endif %}",
    "{% if ns.t >= ns.u %}x{% endif %}",
    "{% if ns.a in [ns.b] %}x{% endif %}",
    "{% if ns.a not in (ns.b, 1) %}x{% endif %}",
    "{{ [ns.b].index(ns.a) }}",
    "{{ [ns.b, ns.b].count(ns.a) }}",
    "{{ (ns.u,).count(ns.t) }}",
    "{{ [ns.a, ns.b] | sort | length }}",
    "{{ [{'k': ns.a}, {'k': ns.b}] | sort(attribute='k') | length }}",
    "{{ [ns.t, ns.u] | unique | list | length }}",
    "{{ [ns.a, ns.b] | max | length }}",
    "{{ [ns.t, ns.u] | min | length }}",
    "{{ [{'k': ns.a}, {'k': ns.b}] | groupby('k') | list | length }}",
    "{{ [ns.a] | select('eq', ns.b) | list | length }}",
    "{{ [ns.a] | reject('in', [ns.b]) | list | length }}",
    "{% if ns.a is eq(ns.b) %}x{% endif %}",
    "{{ {ns.t: 1} }}",
    "{{ {}[ns.t] }}",
    "{{ {'x': 1}.get(ns.t) }}",
    "{{ {}[ns.a].x }}",
    "{{ ns.d == ns.e }}",
    "{{ ns }}",
    "{{ ns.a }}",
    "{{ ns.d.items() }}",
    "{{ ns.d.values() }}",
    "{{ ns.a | string | length }}",
    "{{ ns.d | tojson | length }}",
    "{{ '%r' % [ns.a] }}",
    "{{ '{}'.format(ns.t) }}",
    "{{ raise_exception(ns.a) }}",
    "{{ dict(k=ns.d) | dictsort(by='value') }}{{ {'a': ns.a, 'b': ns.b} | dictsort(by='value') }}",
]
FREEZERS = [_PAIR + tail for tail in _TAILS]
