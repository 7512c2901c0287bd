"""instructor, by a named function (TOOLS, its default) and by a form (JSON_SCHEMA)."""

from __future__ import annotations

from typing import Any

import asked
import instructor
from openai import OpenAI
from pydantic import BaseModel

openai = OpenAI(base_url=f"{asked.URL}/v1", api_key=asked.KEY, max_retries=0)


class Person(BaseModel):
    name: str
    age: int


def ask(mode: instructor.Mode) -> dict[str, Any]:
    person = instructor.from_openai(openai, mode=mode).chat.completions.create(
        model=asked.MODEL,
        messages=asked.PERSON_USER,
        response_model=Person,
        max_retries=0,
        max_tokens=asked.MAX_FORM_TOKENS,
    )
    return person.model_dump()


def text() -> str:
    answer = instructor.from_openai(openai).chat.completions.create(
        model=asked.MODEL, messages=asked.USER, response_model=None, max_tokens=asked.MAX_TOKENS
    )
    return answer.choices[0].message.content


def objects() -> list[dict[str, Any]]:
    """Objects that grow; the last one is whole."""
    people = instructor.from_openai(openai).chat.completions.create_partial(
        model=asked.MODEL,
        messages=asked.PERSON_USER,
        response_model=Person,
        max_retries=0,
        max_tokens=asked.MAX_FORM_TOKENS,
    )
    return [person.model_dump() for person in people]


def schema_by_function() -> dict[str, Any]:
    return ask(instructor.Mode.TOOLS)


def schema() -> dict[str, Any]:
    return ask(instructor.Mode.JSON_SCHEMA)


asked.report(text=text, objects=objects, schema_by_function=schema_by_function, schema=schema)
