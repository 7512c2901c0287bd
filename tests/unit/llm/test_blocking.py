"""The Python API over tiny checkpoints on disk: prompts, streams, chat, threads, and failures."""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashdraft import LLM, Generation, GrammarSpec, SamplingParams
from flashdraft.core import FinishReason, GenerationStats, TokenEvent, ToolCall
from flashdraft.errors import CapacityError, EngineLostError, FlashdraftError, RequestError
from flashdraft.llm.answers import Answers
from flashdraft.llm.asking import tool_use_of
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter

OPTIONS = {"device": "cpu", "dtype": "float32", "cache_gb": 0.01}
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)
MESSAGES = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def llm(folder, drafter_folder) -> LLM:
    return LLM(str(folder), draft=str(drafter_folder), verify=4, **OPTIONS)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(str(folder), draft=None, **OPTIONS)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    """After every test the shared engine is idle, with all its pages free."""
    yield
    assert not llm.engine.has_work and not llm._mailboxes
    llm.engine.check_integrity()
    for pool in llm.engine.book.pools:
        assert pool.num_available == pool.num_pages


def outcome(generation):
    return generation.text, generation.token_ids, generation.finish_reason


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_of_every_kind(llm):
    ids = llm.tokenizer.encode("the lazy dog")
    (from_text,) = llm.generate("the lazy dog", SHORT)
    assert len(from_text.token_ids) == 12 and from_text.finish_reason is FinishReason.LENGTH
    assert from_text.text == llm.tokenizer.decode(from_text.token_ids)
    assert from_text.stats.prompt_tokens == len(ids)
    for prompts in (["the lazy dog"], ids, [ids], tuple(ids), (ids,), [tuple(ids)]):
        (generation,) = llm.generate(prompts, SHORT)
        assert outcome(generation) == outcome(from_text)
    mixed = llm.generate([ids, "the lazy dog", "a fox"], SHORT)
    assert [outcome(g) for g in mixed[:2]] == [outcome(from_text)] * 2
    assert outcome(mixed[2]) == outcome(llm.generate("a fox", SHORT)[0])
    assert llm.generate([]) == [] == llm.generate([], [])


def test_the_default_is_greedy_and_ends_at_256(llm):
    (generation,) = llm.generate("the dog")
    assert len(generation.token_ids) <= 256
    assert outcome(generation) == outcome(llm.generate("the dog", SamplingParams())[0])


def test_params_for_all_or_for_each(llm):
    short, sampled = llm.generate(["a fox", "a fox"], [SHORT, SAMPLED])
    assert outcome(short) == outcome(llm.generate("a fox", SHORT)[0])
    assert outcome(sampled) == outcome(llm.generate("a fox", [SAMPLED])[0])
    assert outcome(short) != outcome(sampled)
    for count in (0, 1, 3):
        with pytest.raises(RequestError, match=f"2 prompts and {count} SamplingParams"):
            llm.generate(["a fox", "a dog"], [SHORT] * count)


def test_more_prompts_than_the_batch_holds(llm, plain):
    prompts = [[3 + i, 50, 60 + i] for i in range(2 * llm.engine.config.max_batch + 1)]
    drafted = llm.generate(prompts, SAMPLED)
    assert [outcome(g) for g in drafted] == [outcome(g) for g in plain.generate(prompts, SAMPLED)]


def test_seeds(llm, plain):
    one, other = (llm.generate("a fox", SAMPLED)[0] for _ in range(2))
    assert outcome(one) == outcome(other) == outcome(plain.generate("a fox", SAMPLED)[0])
    unseeded = SamplingParams(max_tokens=12, ignore_eos=True, temperature=5.0)
    assert len({g.text for g in llm.generate(["a fox"] * 4, unseeded)}) > 1


@pytest.mark.parametrize("options", [{"draft": "ngram"}, {"draft": None}, {"verify": 0}, {}])
def test_every_way_of_drafting_gives_the_same_answers(folder, drafter_folder, plain, options):
    draft = options.get("draft", drafter_folder)
    other = LLM(folder, **{**OPTIONS, "max_batch": 3, **options, "draft": draft})
    prompts = ["the dog the dog the dog", "a fox"]
    for params in (SHORT, SAMPLED):
        ours, theirs = other.generate(prompts, params), plain.generate(prompts, params)
        assert [outcome(g) for g in ours] == [outcome(g) for g in theirs]
    assert (other.drafter_name is None) == (draft in (None, "ngram"))


@pytest.mark.parametrize("begin", [0, 3, 7])
def test_stop_strings_cut_the_text(llm, plain, begin):
    whole = llm.generate("a fox", SAMPLED)[0].text
    stop = whole[begin : begin + 3]
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5, stop=stop)
    (drafted,) = llm.generate("a fox", params)
    assert drafted.text == whole[: whole.index(stop)]
    assert drafted.finish_reason is FinishReason.STOP
    assert outcome(drafted) == outcome(plain.generate("a fox", params)[0])


def test_the_stop_token_is_in_the_ids_and_not_in_the_text(llm):
    free = llm.generate("a fox", SAMPLED)[0].token_ids
    place = next(i for i, token in enumerate(free) if i > 3 and token not in free[:i])
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, stop_token_ids=[free[place]])
    (generation,) = llm.generate("a fox", params)
    assert generation.token_ids == free[: place + 1]
    assert generation.text == llm.tokenizer.decode(free[:place])


# -- chat ------------------------------------------------------------------------------------------


def test_chat_is_generate_over_the_models_template(llm):
    text = "<|im_start|>user\nthe quick fox<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat_prompt(MESSAGES) == llm.tokenizer.encode(text)
    answer = llm.chat(MESSAGES, SHORT)
    assert outcome(answer) == outcome(llm.generate([llm.chat_prompt(MESSAGES)], SHORT)[0])
    *_, last = llm.stream(MESSAGES, SHORT)
    assert outcome(last.generation) == outcome(answer)
    with pytest.raises(RequestError, match="messages"):
        llm.chat([], SHORT)


def test_the_next_turn_finds_the_last_one_cached(llm):
    conversation = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
    answer = llm.chat(conversation, SHORT)
    conversation += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "and then?"},
    ]
    assert llm.chat(conversation, SHORT).stats.cached_tokens >= 16


# -- streams ---------------------------------------------------------------------------------------


def test_a_stream_is_generate_in_pieces(llm):
    for params in (SHORT, SAMPLED):
        events = list(llm.stream("a fox", params))
        (whole,) = llm.generate("a fox", params)
        assert "".join(event.text for event in events) == whole.text
        assert [t for event in events for t in event.token_ids] == whole.token_ids
        assert [event.generation is None for event in events] == [True] * (len(events) - 1) + [
            False
        ]
        assert outcome(events[-1].generation) == outcome(whole)


@pytest.mark.parametrize("num_events", range(4))
def test_closing_a_stream_cancels_its_request(llm, num_events):
    stream = llm.stream("a fox", SamplingParams(max_tokens=500, ignore_eos=True))
    for _ in range(num_events):
        next(stream)
    assert llm.engine.has_work == (num_events > 0)
    stream.close()
    assert not llm.engine.has_work and not llm._mailboxes


def test_a_stream_that_fails_in_the_callers_loop_is_cancelled(llm):
    with pytest.raises(ZeroDivisionError):
        for event in llm.stream("a fox", SHORT):
            len(event.token_ids) // 0
    gc.collect()  # the frame held the generator
    assert not llm.engine.has_work


@pytest.mark.parametrize("place", ["target.forward", "_committer.settle"])
def test_a_stream_collected_in_the_middle_of_a_step_harms_nobody(llm, monkeypatch, place):
    """The collector runs wherever it likes: here within a step, in the stepping thread."""
    expected = outcome(llm.generate("a dog", SHORT)[0])
    doomed = llm.stream("a fox", SamplingParams(max_tokens=500, ignore_eos=True))
    next(doomed)
    part, name = place.split(".")
    owner, calls = getattr(llm.engine, part), []
    method = getattr(owner, name)

    def collect_during(*arguments):
        calls.append(name)
        if len(calls) == 3:
            doomed.close()
        return method(*arguments)

    monkeypatch.setattr(owner, name, collect_during)
    (generation,) = llm.generate("a dog", SHORT)
    assert outcome(generation) == expected and generation.stats.preemptions == 0
    assert len(calls) > 3 and not llm.engine.has_work


def test_streams_interleave_with_each_other_and_with_generate(llm):
    expected = {p: outcome(llm.generate(p, SAMPLED)[0]) for p in ("a fox", "a dog", "a tree")}
    one, other = llm.stream("a fox", SAMPLED), llm.stream("a dog", SAMPLED)
    events = {"a fox": [next(one)], "a dog": [next(other)]}
    assert outcome(llm.generate("a tree", SAMPLED)[0]) == expected["a tree"]
    while len(events["a dog"]) < 3:
        events["a dog"].append(next(other))
    events["a fox"] += list(one)
    events["a dog"] += list(other)
    for prompt, mine in events.items():
        assert outcome(mine[-1].generation) == expected[prompt]
        assert "".join(event.text for event in mine) == expected[prompt][0]


def test_a_streams_verify_length_is_its_own(llm):
    *_, last = llm.stream("a fox", SHORT, verify=0)
    assert last.generation.stats.drafted == 0
    *_, last = llm.stream("a fox", SHORT, verify=2)
    assert 0 < last.generation.stats.drafted <= 2 * last.generation.stats.steps


@pytest.mark.parametrize("tree", [15, "auto"])
def test_trees_write_what_is_written_plainly(folder, drafter_folder, plain, tree):
    prompts = ["a fox", "the quick brown"]
    with LLM(str(folder), draft=str(drafter_folder), tree=tree, **OPTIONS) as grown:
        found = grown.generate(prompts, SHORT)
        assert grown.engine.config.tree == (None if tree == "auto" else tree)  # no tree pays here
    assert [one.token_ids for one in found] == [
        one.token_ids for one in plain.generate(prompts, SHORT)
    ]
    assert (sum(one.stats.branches for one in found) > 0) == (tree != "auto")


def test_off_and_nothing_said_of_trees_are_chains(folder, drafter_folder):
    for said in ({"tree": "off"}, {"tree": None}, {}):
        with LLM(str(folder), draft=str(drafter_folder), **said, **OPTIONS) as chains:
            assert chains.engine.config.tree is None
            (found,) = chains.generate("a fox", SHORT)
            assert found.stats.branches == 0


# -- without a tokenizer ---------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_works_with_token_ids(folder, tmp_path, llm):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path / name)
    bare = LLM(tmp_path, draft="ngram", verify=2, **OPTIONS)
    assert bare.tokenizer is None
    ids = [5, 77, 123]
    (generation,) = bare.generate(ids, SHORT)
    assert generation.token_ids == llm.generate(ids, SHORT)[0].token_ids
    assert generation.text == ""
    for call in (
        lambda: bare.generate("a fox"),
        lambda: bare.generate(ids, SamplingParams(stop="x")),
        lambda: bare.chat(MESSAGES),
        lambda: next(bare.stream("a fox")),
    ):
        with pytest.raises(RequestError, match="no tokenizer.*token ids"):
            call()
    assert bare.generate(ids, SHORT)[0].token_ids == generation.token_ids


# -- threads ---------------------------------------------------------------------------------------


def test_threads_get_their_own_answers(llm):
    prompts = [[f"the {word}", word] for word in ("fox", "dog", "tree", "token")]
    expected = [[outcome(g) for g in llm.generate(both, SAMPLED)] for both in prompts]
    found = [[] for _ in prompts]
    gate = threading.Barrier(len(prompts))

    def work(place):
        gate.wait()
        for _ in range(3):
            if place == 0:
                ends = [list(llm.stream(text, SAMPLED))[-1].generation for text in prompts[0]]
            else:
                ends = llm.generate(prompts[place], SAMPLED)
            found[place].append([outcome(g) for g in ends])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == [[answers] * 3 for answers in expected]


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("boom"), CapacityError, "out of memory.*lower max_context"),
        (ValueError("boom"), FlashdraftError, "ValueError: boom"),
    ],
)
def test_a_failed_request_raises_and_the_next_one_is_answered(
    llm, monkeypatch, error, kind, message
):
    expected = outcome(llm.generate("a fox", SHORT)[0])
    forward = llm.engine.target.forward

    def broken(token_ids, batch):
        if 299 in token_ids.tolist():
            raise error
        return forward(token_ids, batch)

    monkeypatch.setattr(llm.engine.target, "forward", broken)
    stream = llm.stream("a fox", SHORT)
    first = next(stream)
    mates = [outcome(llm.generate([ids], SHORT)[0]) for ids in ([5, 6], [7, 8])]
    first_mate, failed, second_mate = llm.generate([[5, 6], [299], [7, 8]], SHORT)
    assert [outcome(first_mate), outcome(second_mate)] == mates, "one failure costs them nothing"
    assert failed.finish_reason is FinishReason.ERROR and re.search(message, failed.error)
    with pytest.raises(kind, match=message) as caught:
        llm.generate([[299], [5, 299]], SHORT)
    assert type(caught.value) is kind
    *_, last = stream
    assert outcome(last.generation) == expected and expected[0].startswith(first.text)
    *_, last = llm.stream([299], SHORT)
    assert last.generation.finish_reason is FinishReason.ERROR and last.generation.error
    assert outcome(llm.generate("a fox", SHORT)[0]) == expected


def test_a_forked_process_can_go_on_using_an_llm(folder):
    """As servers that fork their workers do; torch's own threads would not survive it."""
    script = (
        "import os, signal, sys\n"
        "from flashdraft import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device='cpu')\n"
        "params = SamplingParams(max_tokens=8)\n"
        "before = llm.generate([[5, 6]] * 3, params)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(30)\n"
        "    after = llm.generate([[5, 6]] * 3, params)\n"
        "    os._exit([g.token_ids for g in before] != [g.token_ids for g in after])\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], timeout=120, check=False)
    assert done.returncode == 0


def test_a_fork_waits_for_the_step_of_another_thread(folder):
    script = (
        "import os, signal, sys, threading\n"
        "from flashdraft import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device='cpu')\n"
        "ask = lambda n: llm.generate([[5, 6]], SamplingParams(max_tokens=n, ignore_eos=True))\n"
        "expected = ask(8)[0].token_ids\n"
        "other = threading.Thread(target=ask, args=(200,))\n"
        "other.start()\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(30)\n"
        "        same = ask(8)[0].token_ids == expected\n"
        "        os._exit(0 if same and not llm.engine.has_work else 1)\n"
        "    if os.waitpid(child, 0)[1]:\n"
        "        os._exit(1)\n"
        "other.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], timeout=120, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("settings", [{}, 0, 1.5])
def test_settings_of_another_kind_are_refused(plain, settings):
    with pytest.raises(RequestError, match="must be"):
        plain.generate("a", settings)


def test_draft_none_may_be_spelled_out(folder):
    llm = LLM(str(folder), draft="none", **OPTIONS)
    assert llm.drafter_name is None and llm.engine.proposer is None


# -- several answers -------------------------------------------------------------------------------


def test_several_answers_are_those_of_the_seeds_one_by_one(llm, plain):
    several = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5, n=3)
    for one in (llm, plain):
        for first in one.generate(["a fox", "a dog"], several):
            assert len(first.others) == 2 and not any(other.others for other in first.others)
    fox, dog = llm.generate(["a fox", "a dog"], several)
    for first, prompt in ((fox, "a fox"), (dog, "a dog")):
        alone = [llm.generate(prompt, replace(several, n=1, seed=seed))[0] for seed in (5, 6, 7)]
        assert [outcome(one) for one in (first, *first.others)] == [outcome(one) for one in alone]
    assert len({one.text for one in (fox, *fox.others)}) == 3
    edge = llm.generate("a fox", replace(several, seed=2**63 - 1))[0]
    assert outcome(edge.others[0]) == outcome(
        llm.generate("a fox", replace(several, n=1, seed=-(2**63)))[0]
    )


def test_several_answers_share_the_prompts_pages(llm):
    llm.engine.forget_prefixes()
    long = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, n=4)
    prompts = [list(range(5, 69)), list(range(105, 169))]
    for first in llm.generate(prompts, long):
        cached = [one.stats.cached_tokens for one in (first, *first.others)]
        assert cached[0] == 0 and min(cached[1:]) >= 48, "they find the first one's pages"


def test_several_greedy_answers_and_several_in_a_stream_are_refused(llm):
    with pytest.raises(RequestError, match="n is 2 and temperature 0.*Set a temperature"):
        SamplingParams(n=2)
    with pytest.raises(RequestError, match="n is 2; a stream is one answer: use generate"):
        next(llm.stream("a fox", SamplingParams(n=2, temperature=1.0)))


def test_settings_by_the_other_name(llm):
    assert outcome(llm.generate("a fox", sampling_params=SHORT)[0]) == outcome(
        llm.generate("a fox", SHORT)[0]
    )
    assert outcome(llm.chat(MESSAGES, sampling_params=SAMPLED)) == outcome(
        llm.chat(MESSAGES, SAMPLED)
    )
    *_, last = llm.stream("a fox", sampling_params=SHORT)
    assert outcome(last.generation) == outcome(llm.generate("a fox", SHORT)[0])
    with pytest.raises(RequestError, match="params and sampling_params are one thing"):
        llm.generate("a fox", SHORT, sampling_params=SHORT)


def test_without_max_tokens_an_answer_goes_to_the_end_of_the_context(llm, plain):
    endless = SamplingParams(max_tokens=None, min_tokens=900, temperature=1.0, seed=1, top_k=-1)
    (drafted,) = llm.generate([[5] * 1000], replace(endless, min_tokens=0, ignore_eos=True))
    assert len(drafted.token_ids) == 24 and drafted.finish_reason is FinishReason.LENGTH
    assert endless.top_k == 0 and endless.max_tokens is None
    same = plain.generate([[5] * 1000], replace(endless, min_tokens=0, ignore_eos=True))
    assert outcome(same[0]) == outcome(drafted)


def test_logprobs_of_a_prompt(llm, plain):
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1)
    for one in (llm, plain):
        (generation,) = one.generate([[5, 6, 7]], params)
        first, *rest = generation.prompt_logprobs
        assert first is None and [len(token.top) for token in rest] == [2, 2]
    assert llm.generate([[5, 6, 7]], SHORT)[0].prompt_logprobs is None


# -- conversations ---------------------------------------------------------------------------------


def test_many_conversations(llm):
    other = [{"role": "user", "content": "a dog"}]
    many = llm.chat([MESSAGES, other], [SHORT, SAMPLED])
    assert [outcome(one) for one in many] == [
        outcome(llm.chat(MESSAGES, SHORT)),
        outcome(llm.chat(other, SAMPLED)),
    ]
    assert [type(one) for one in (llm.chat([other], SHORT), llm.chat(other, SHORT))] == [
        list,
        Generation,
    ]
    for wrong in ([[]], [other, []], [other, "x"]):
        with pytest.raises(RequestError, match="messages must be a non-empty list"):
            llm.chat(wrong, SHORT)


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the fox"}}\n</tool_call>'
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["the fox", "the dog"]}},
            "required": ["at"],
        },
        "strict": True,
    },
}


def test_calls_and_thoughts_stand_apart(llm):
    """A grammar makes the random model write what a real one would."""
    thought = GrammarSpec.regex("<think>the dog</think>a tree")
    said = llm.chat(MESSAGES, SamplingParams(max_tokens=200), grammar=thought)
    assert said.text == "<think>the dog</think>a tree" and said.calls == ()
    call = GrammarSpec.choice([CALL])
    answer = llm.chat(MESSAGES, SamplingParams(max_tokens=300), grammar=call)
    assert answer.calls == () and answer.content == answer.text == CALL, "no tools were offered"
    bound = llm._asker.chats([MESSAGES], SHORT, tool_use_of([LOOK], None), None, None)[0]
    assert bound.requests[0].grammar is not None, "a strict tool binds the answer"


@pytest.mark.parametrize(
    "choice", ["required", "look", {"type": "function", "function": {"name": "look"}}]
)
def test_a_call_can_be_forced(llm, choice):
    """The random model, too, calls a tool that it must call: the grammar leaves nothing else."""
    bare = {**LOOK["function"], "strict": False}  # without its frame
    params = SamplingParams(max_tokens=300)
    answer = llm.chat(MESSAGES, params, tools=[bare], tool_choice=choice)
    (call,) = answer.calls
    assert call.name == "look" and call.arguments["at"] in ("the fox", "the dog")
    *_, last = llm.stream(MESSAGES, params, tools=[bare], tool_choice=choice)
    assert last.generation.calls == answer.calls


def test_tools_that_must_not_be_called_are_not_told_of(llm):
    told = llm.chat(MESSAGES, SHORT, tools=[LOOK], tool_choice="none")
    assert outcome(told) == outcome(llm.chat(MESSAGES, SHORT))


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        (None, "required", "asks for a call, but there are no tools"),
        ([LOOK], "lock", "'lock'; it must be 'auto', 'none', 'required', or the name of one"),
        ([LOOK], 5, "is 5; it must be"),
        ([LOOK], {"name": "look"}, "it must be"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(llm, tools, choice, said):
    with pytest.raises(RequestError, match=said):
        llm.chat(MESSAGES, SHORT, tools=tools, tool_choice=choice)


def test_a_call_is_read_from_the_answer(llm):
    asked = llm._asker.chats([MESSAGES], SHORT, tool_use_of([LOOK], None), None, None)
    answers = Answers(asked)
    (request,) = answers.first_requests
    stats = GenerationStats()
    whole = Generation(CALL, [1], FinishReason.STOP, stats)
    answers.take(TokenEvent(request.id, (1,), CALL[:9], (True,), pieces=(CALL[:9],)))
    assert answers.waiting == {request.id} and answers.num_done == 0
    answers.take(
        TokenEvent(request.id, (2,), CALL[9:], (True,), generation=whole, pieces=(CALL[9:],))
    )
    (found,) = answers.generations()
    assert found.calls == (ToolCall("look", '{"at": "the fox"}'),) and not answers.waiting
    assert found.calls[0].arguments == {"at": "the fox"}
    assert found.content == "" and found.text == CALL and answers.num_done == 1


def test_switches_reach_the_template(llm, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if enable_thinking %}hmm{% endif %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    other = LLM(copy, draft=None, **OPTIONS)
    plain_ids = other.chat_prompt(MESSAGES)
    switched = other.chat_prompt(MESSAGES, chat_template_kwargs={"enable_thinking": True})
    assert switched == plain_ids + other.tokenizer.encode("hmm")
    answer = other.chat(MESSAGES, SHORT, chat_template_kwargs={"enable_thinking": True})
    assert answer.stats.prompt_tokens == len(switched)
    with pytest.raises(RequestError, match="chat_template_kwargs is 5; it must be a mapping"):
        other.chat(MESSAGES, chat_template_kwargs=5)
    with pytest.raises(RequestError, match="are for conversations"):
        other.stream("a fox", chat_template_kwargs={"enable_thinking": True}).__next__()


# -- the end ---------------------------------------------------------------------------------------


def test_close_frees_the_models_memory(folder, drafter_folder):
    llm = LLM(str(folder), draft=str(drafter_folder), **OPTIONS)
    llm.generate("a fox", SHORT)
    stream = llm.stream("a fox", SHORT)
    next(stream)
    gone = [weakref.ref(one) for one in (llm.engine, llm.engine.target, llm.engine.cache)]
    llm.close()
    assert [one() for one in gone] == [None] * 3
    with pytest.raises(EngineLostError, match="closed before the answer was complete"):
        next(stream)
    for use in (lambda: llm.generate("a fox"), lambda: llm.chat(MESSAGES), lambda: llm.engine):
        with pytest.raises(EngineLostError, match="This LLM is closed; make a new one"):
            use()
    llm.close()
    assert repr(llm).endswith(", closed)")


def test_a_with_block_closes(folder):
    with LLM(str(folder), draft=None, **OPTIONS) as llm:
        assert llm.generate("a fox", SHORT)[0].token_ids
    with pytest.raises(EngineLostError):
        llm.generate("a fox", SHORT)


def test_closing_ends_the_wait_of_another_thread(folder):
    llm, errors = LLM(str(folder), draft=None, **OPTIONS), []

    def wait():
        try:
            for _ in range(1000):
                llm.generate("a fox", SamplingParams(max_tokens=900, ignore_eos=True))
        except EngineLostError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not llm.engine.has_work:
        pass
    llm.close()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2 and not any(thread.is_alive() for thread in threads)


def test_reprs(llm, plain):
    assert re.fullmatch(
        r"LLM\('.*', draft='.*', device='cpu', dtype='float32', max_context=1024, max_batch=8\)",
        repr(llm),
    )
    assert "draft=None" in repr(plain)
    int8 = LLM(plain.model, draft=None, device="cpu", dtype="int8", cache_gb=0.01)
    assert "dtype='int8'" in repr(int8), "as it was named, not what activations are in"


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([{"prompt": "a fox"}], r"A prompt is {'prompt': 'a fox'}; it must be text or a list"),
        (MESSAGES, r"A prompt is {.*\(messages: chat\)"),
        (b"x" * 10**6, r"prompts is b'x{,200}\.\.\..*; it must be text"),
    ],
)
def test_what_is_no_prompt_is_named_in_short(plain, prompts, said):
    with pytest.raises(RequestError, match=said) as caught:
        plain.generate(prompts)
    assert len(str(caught.value)) < 500
