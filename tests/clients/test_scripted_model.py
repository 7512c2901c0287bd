"""What needs a cleverer model than the default one: a script stands in for it.

Agents decide for themselves to call, hear of the result and answer; aider has a file changed.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import Ask
from tests.e2e.live_server import LiveServer
from tests.unit.server.scripted import CALL

ANSWER = "Two cloudy days in Paris."
EDIT = """\
greeting.py
```python
<<<<<<< SEARCH
    print("hello")
=======
    print("goodbye")
>>>>>>> REPLACE
```
"""
LOOPS = [
    ("clients", "pydantic_ai_agent", "tools"),
    ("clients", "pydantic_ai_agent", "tools_by_anthropic"),
    ("clients", "openai_agents", "loop"),
    ("clients", "openai_agents", "loop_by_responses"),
    ("clients", "llm_command", "tools"),
    ("clients", "ollama_client", "tools"),
    ("js", "ollama_client", "tools"),
    ("js", "ai_sdk_openai_compatible", "loop"),
    ("js", "ai_sdk_anthropic", "loop"),
]


def value_of(ask: Ask, environment: str, script: str, aspect: str) -> Any:
    found = ask(environment, script, [aspect])[aspect]
    assert "error" not in found, found["error"]
    return found["value"]


@pytest.mark.parametrize(("environment", "script", "aspect"), LOOPS)
def test_a_loop(
    scripted: LiveServer, ask_scripted: Ask, environment: str, script: str, aspect: str
) -> None:
    """The model calls of its own accord, is sent what came of it, and answers."""
    engine = scripted.play(CALL, ANSWER)
    found = value_of(ask_scripted, environment, script, aspect)
    assert found["answer"] == ANSWER
    assert found["name"] == "get_weather"
    assert found["arguments"] == {"city": "Paris", "days": 2}
    assert len(engine.requests) == 2
    prompt = engine.tokenizer.decode(engine.requests[1].prompt_ids, skip_special=False)
    assert "get_weather=cloudy, 12 degrees" in prompt


def test_aider_changes_a_file(scripted: LiveServer, ask_scripted: Ask) -> None:
    scripted.play(EDIT)
    changed = value_of(ask_scripted, "aider", "aider_command", "edit")
    assert changed == 'def greet():\n    print("goodbye")\n'
