"""A small tokenizer in the manner of Llama 3.1, and a template that does what its own does."""

from __future__ import annotations

from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.chat_factory import byte_tokenizer

LLAMA3_MARKS = [
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
]  # fmt: skip
# Tools stand in the first question; results come from "ipython"; a message has one call at most.
LLAMA3_TEMPLATE = """\
{%- macro turn(role, text) -%}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + text + '<|eot_id|>' -}}
{%- endmacro -%}
{{- bos_token or '<|begin_of_text|>' -}}
{%- set known = namespace(system='', rest=messages, told=false) -%}
{%- if messages[0].role == 'system' -%}
  {%- set known.system = messages[0].content | trim -%}
  {%- set known.rest = messages[1:] -%}
{%- endif -%}
{{- turn('system', ('Environment: ipython\\n' if tools else '') + known.system) -}}
{%- for m in known.rest -%}
  {%- if m.role == 'user' and tools and not known.told -%}
    {%- set known.told = true -%}
    {%- set functions = tools | map('tojson') | join('\\n') -%}
    {%- set form = 'Answer with {"name": function, "parameters": its arguments}.' -%}
    {{- turn('user', form + '\\n' + functions + '\\n' + m.content | trim) -}}
  {%- elif m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}
      {{- raise_exception('A message can have one tool call.') -}}
    {%- endif -%}
    {%- set call = m.tool_calls[0].function -%}
    {%- set parameters = call.arguments | tojson -%}
    {{- turn('assistant', '{"name": "' + call.name + '", "parameters": ' + parameters + '}') -}}
  {%- elif m.role in ('tool', 'ipython') -%}
    {{- turn('ipython', m.content if m.content is string else m.content | tojson) -}}
  {%- else -%}
    {{- turn(m.role, m.content | trim) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""


def llama3_tokenizer() -> Tokenizer:
    return byte_tokenizer(LLAMA3_MARKS, [], LLAMA3_TEMPLATE)
