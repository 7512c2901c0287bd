"""What those who come from elsewhere type: every word works here, or says what to type.

The table in docs/python.md is HABITS, word for word; what just works is tried here, row by row.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashdraft
from flashdraft import LLM, Generation, SamplingParams
from flashdraft.core import FinishReason, GenerationStats
from flashdraft.errors import RequestError, UnknownWordError
from flashdraft.habits import HABITS
from tests.tiny import make_tiny_checkpoint

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_gb": 0.01, "draft": "ngram"}
SAMPLED = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "ignore_eos": True}
TALK = [{"role": "user", "content": "the quick fox"}]
DONE = Generation("a b", [1, 2], FinishReason.STOP, GenerationStats())
WORDS = [(place, word) for place, words in HABITS.items() for word in words]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3"), **OPTIONS)


def use(llm: LLM, place: str, word: str) -> None:
    """Type a word in its place."""
    if place == "from flashdraft import …":
        exec(f"from flashdraft import {word}")
    elif place == "LLM(…)":
        LLM("no-such-model", **{word: 1})
    elif place == "SamplingParams(…)":
        SamplingParams(**{word: 1})
    elif place == "generate(…), chat(…), stream(…)":
        for call in (llm.generate, llm.chat, llm.stream):
            with pytest.raises(UnknownWordError) as caught:
                call("the fox", **{word: 1})
            assert HABITS[place][word] in str(caught.value) and call.__name__ in str(caught.value)
        llm.generate("the fox", **{word: 1})
    else:
        owner = {"llm.…": llm, "llm.get_tokenizer().…": llm.get_tokenizer(), "generation.…": DONE}
        thing: Any = owner[place]
        if word == "(…)":
            thing("the fox", max_tokens=8)
        elif word == "[…]":
            thing["choices"][0]["text"]
        else:
            getattr(thing, word)


@pytest.mark.parametrize(("place", "word"), WORDS, ids=[f"{p}-{w}" for p, w in WORDS])
def test_a_word_of_others_says_what_to_type(llm: LLM, place: str, word: str) -> None:
    with pytest.raises((UnknownWordError, AttributeError, ImportError)) as caught:
        use(llm, place, word)
    assert HABITS[place][word] in str(caught.value)
    name = word if word not in ("(…)", "[…]") else ""
    assert name in str(caught.value)


def test_no_word_of_the_table_exists_here(llm: LLM) -> None:
    """Else it would be said to be missing, and be there."""
    fields = SamplingParams.__dataclass_fields__.keys()
    assert not HABITS["SamplingParams(…)"].keys() & fields
    assert not HABITS["from flashdraft import …"].keys() & set(dir(flashdraft))
    for place, thing in (
        ("llm.…", LLM),
        ("llm.…", flashdraft.AsyncLLM),
        ("generation.…", Generation),
        ("llm.get_tokenizer().…", type(llm.get_tokenizer())),
    ):
        assert not HABITS[place].keys() & set(dir(thing)), place


def test_what_the_table_advises_exists(llm: LLM) -> None:
    """Every name that an advice has in front of `=` or behind a point is one."""
    known = {
        *SamplingParams.__dataclass_fields__,
        *("draft", "quantize", "max_context", "max_batch", "cache_gb", "kv_dtype", "dtype"),
        *("device", "grammar", "tools", "chat_template_kwargs", "vision", "mmproj", "lora"),
    }
    typed = {
        name
        for words in HABITS.values()
        for advice in words.values()
        for name in re.findall(r"(?<![\w.])([a-z_]+)=(?!=)", advice)
    }
    assert typed <= known, typed - known
    attributes = {
        name
        for advice in HABITS["generation.…"].values()
        for name in re.findall(r"(?:^|[ (])\.([a-z_]+)", advice)
    }
    assert attributes and attributes <= set(dir(DONE)) | DONE.__dict__.keys()
    methods = {
        name
        for words in HABITS.values()
        for advice in words.values()
        for name in re.findall(r"\bllm\.([a-z_]+)", advice)
    }
    assert methods and all(hasattr(llm, name) for name in methods)


def test_a_misspelt_word_is_guessed_and_a_strange_one_named(llm: LLM) -> None:
    with pytest.raises(UnknownWordError, match="LLM.* has no max_contxt. Did you mean max_context"):
        LLM("x", max_contxt=5)
    with pytest.raises(
        TypeError, match=r"SamplingParams\(…\) has no temprature. Did you mean temp"
    ):
        SamplingParams(temprature=1)
    with pytest.raises(RequestError, match=r"SamplingParams\(max_tokens=…\)"):
        llm.generate("a", max_tokens=8)
    with pytest.raises(RequestError, match="generate.* has no zzz"):
        llm.generate("a", zzz=8)
    with pytest.raises(AttributeError, match="no attribute 'zzz'"):
        getattr(llm, "zz" + "z")
    assert not hasattr(DONE, "__deepcopy__") and not hasattr(flashdraft, "zzz")


def test_results_can_be_copied_and_pickled_as_ever() -> None:
    assert copy.deepcopy(DONE) == DONE == pickle.loads(pickle.dumps(DONE)) == copy.copy(DONE)


# -- what just works -------------------------------------------------------------------------------


def texts(found: list[Generation]) -> list[str]:
    return [one.text for one in found]


def works_sampling_params(llm: LLM) -> bool:
    params = SamplingParams(**SAMPLED)
    by_name = llm.generate(["a fox"], sampling_params=params)
    return texts(by_name) == texts(llm.generate(["a fox"], params))


def works_n(llm: LLM) -> bool:
    (one,) = llm.generate("a fox", SamplingParams(**SAMPLED, n=3))
    return len({one.text, *texts(one.others)}) == 3


def works_top_k(llm: LLM) -> bool:
    return SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()


def works_max_tokens(llm: LLM) -> bool:
    (one,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=None, ignore_eos=True))
    return len(one.token_ids) == llm.engine.max_context - 3


def works_use_tqdm(llm: LLM) -> bool:
    params = SamplingParams(max_tokens=2)
    return all(len(llm.generate(["a", "b"], params, use_tqdm=on)) == 2 for on in (True, False))


def works_chat(llm: LLM) -> bool:
    params = SamplingParams(**SAMPLED)
    one, many = llm.chat(TALK, params), llm.chat([TALK, TALK], params)
    return isinstance(one, Generation) and texts(many) == [one.text] * 2


def works_logprobs(llm: LLM) -> bool:
    (one,) = llm.generate("a fox", SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1))
    assert one.logprobs is not None and one.prompt_logprobs is not None
    return len(one.logprobs[0].top) == 2 and len(one.prompt_logprobs) == one.stats.prompt_tokens


def works_stop(llm: LLM) -> bool:
    (whole,) = llm.generate("a fox", SamplingParams(**SAMPLED))
    stop = whole.text[2:4]
    (cut,) = llm.generate("a fox", SamplingParams(**SAMPLED, stop=[stop], min_tokens=0))
    return cut.text == whole.text[: whole.text.index(stop)]


def works_tokenizer(llm: LLM) -> bool:
    tokenizer = llm.get_tokenizer()
    return tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


def works_half(llm: LLM) -> bool:
    with pytest.raises(RequestError, match="Did you mean float16\\?"):
        LLM(llm.model, dtype="half", device="cpu")
    return True


WORKS: dict[str, Callable[[LLM], bool]] = {
    "`sampling_params=`": works_sampling_params,
    "`SamplingParams(n=4)`": works_n,
    "`SamplingParams(top_k=-1)`": works_top_k,
    "`SamplingParams(max_tokens=None)`": works_max_tokens,
    "`SamplingParams(stop=[…], min_tokens=…, seed=…)`": works_stop,
    "`SamplingParams(logprobs=5, prompt_logprobs=0)`": works_logprobs,
    "`use_tqdm=`": works_use_tqdm,
    "`chat(messages)`, `chat([messages, …])`": works_chat,
    "`get_tokenizer()`": works_tokenizer,
    '`dtype="half"`': works_half,
}


@pytest.mark.parametrize("typed", WORKS)
def test_what_works_works(llm: LLM, typed: str) -> None:
    assert WORKS[typed](llm)


# -- the page --------------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of docs/python.md."""
    section = PAGE.partition(f"### {heading}\n")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("place", HABITS)
def test_the_page_has_the_table(place: str) -> None:
    expected: dict[str, list[str]] = {}
    for word, advice in HABITS[place].items():
        expected.setdefault(advice, []).append(f"`{word}`")
    assert rows(f"`{place}`") == [[", ".join(w), advice] for advice, w in expected.items()]


def test_the_page_has_what_works() -> None:
    assert [row[0] for row in rows("What just works")] == list(WORKS)
