"""What every client is asked, and how its script reports. Runs in the clients' environments.

A script is called with the server's address (without /v1), the model's name and the aspects wanted;
it prints one JSON object: for each aspect what came of it, or the error.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from schemas import WEATHER_SCHEMA

URL, MODEL = sys.argv[1:3]
KEY = "test-key"  # a server without a key takes any
QUESTION = "Name three colours."
WEATHER_QUESTION = "What is the weather in Paris for the next 2 days?"
PERSON_QUESTION = "Ada Lovelace is 36 years old. Who is it?"
WEATHER = "cloudy, 12 degrees"
MAX_TOKENS = 256  # the answer ends before: some clients refuse one that was cut
MAX_FORM_TOKENS = 200  # enough for a call or a form to end

FUNCTION = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": WEATHER_SCHEMA,
}
USER = [{"role": "user", "content": QUESTION}]
WEATHER_USER = [{"role": "user", "content": WEATHER_QUESTION}]
PERSON_USER = [{"role": "user", "content": PERSON_QUESTION}]


def called(name: str, arguments: Any, answer: str | None = None) -> dict[str, Any]:
    """A call as the tests want it, and the text after its result was sent back."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": name, "arguments": arguments, "answer": answer}


def report(**aspects: Callable[[], Any]) -> None:
    """Run the aspects that were asked for; one that fails does not keep the others from it."""
    found: dict[str, Any] = {}
    for name in sys.argv[3:]:
        try:
            found[name] = {"value": aspects[name]()}
        except Exception:
            found[name] = {"error": traceback.format_exc()[-4000:]}
    print(json.dumps(found))
