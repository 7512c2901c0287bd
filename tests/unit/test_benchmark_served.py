"""Random weights behind flashdraft's own server: what a load through HTTP is measured with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.traffic.served import made_up_tokenizer
from benchmarks.traffic.vocabulary import NUM_BYTES
from benchmarks.traffic.workload import FIRST_TOKEN
from flashdraft.bench.traffic.questions import WORDS
from flashdraft.models.stream_decoder import StreamDecoder

ROOT = Path(__file__).parents[2]


def test_a_word_of_the_load_is_one_token() -> None:
    with made_up_tokenizer(4096) as tokenizer:
        text = " ".join(WORDS)
        ids = tokenizer.encode(text)
        assert len(ids) == len(WORDS)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(tokenizer.encode("Grüße, 7 of 9!")) == "Grüße, 7 of 9!"


@pytest.fixture
def served() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.traffic.served", "--model", "tiny", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        line = next((one for one in process.stdout if one.startswith("Serving ")), "")
        yield line.split()[-1] if line else "it has ended"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_the_server_answers_to_the_length_that_was_asked_for(served: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "of the two"}],
        "max_tokens": 200,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{served}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line[6:] for line in response if line.startswith(b"data: {")]
    events = [json.loads(line) for line in lines]
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 200
    assert usage["prompt_tokens"] >= 3
    texts = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    assert sum(map(bool, texts)) > 5  # as it comes, not at the end


def test_every_token_is_text_that_is_heard() -> None:
    with made_up_tokenizer(1024) as tokenizer:
        decoder = StreamDecoder(tokenizer)
        silent = [index for index in range(1024) if not decoder.push([index])]
        letters = range(FIRST_TOKEN, FIRST_TOKEN + NUM_BYTES)
        assert all(index in letters for index in silent)  # half of a character
