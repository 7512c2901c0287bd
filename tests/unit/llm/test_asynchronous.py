"""AsyncLLM over a tiny checkpoint: many tasks, cancellations, several loops, failures, the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdraft import LLM, AsyncLLM, Generation, GrammarSpec, SamplingParams
from flashdraft.core import FinishReason, TokenEvent
from flashdraft.errors import EngineLostError, FlashdraftError, RequestError
from flashdraft.llm.stepping import Mailbox
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_gb": 0.01}
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, temperature=1.0, seed=9)
MESSAGES = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def blocking(folder: Path) -> LLM:
    return LLM(folder, draft=None, **OPTIONS)


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    drafter = make_tiny_drafter(tmp_path_factory.mktemp("drafter"))
    llm = AsyncLLM(folder, draft=str(drafter), verify=4, **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """After every test the engine is idle soon, with all its pages free."""
    yield shared
    until_idle(shared)


def until_idle(llm: AsyncLLM) -> None:
    gc.collect()
    until = time.monotonic() + 20
    while llm.engine.has_work and time.monotonic() < until:
        time.sleep(0.01)
    assert not llm.engine.has_work and not llm._thread._mailboxes
    llm.engine.check_integrity()
    for pool in llm.engine.book.pools:
        assert pool.num_available == pool.num_pages


def outcome(generation: Generation) -> tuple[str, list[int], FinishReason]:
    return generation.text, generation.token_ids, generation.finish_reason


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine; what its loop has to complain about is an error."""
    complaints: list[Any] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        return await main()

    found = asyncio.run(watched())
    gc.collect()
    assert complaints == []
    return found


# -- the same answers ------------------------------------------------------------------------------


def test_everything_gives_what_the_blocking_api_gives(llm: AsyncLLM, blocking: LLM) -> None:
    several = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3, ignore_eos=True)

    async def main() -> tuple[Any, ...]:
        events = [event async for event in llm.stream("a fox", SAMPLED)]
        return (
            await llm.generate(["a fox", "a dog"], [SHORT, SAMPLED]),
            await llm.generate("a fox", sampling_params=several),
            await llm.chat(MESSAGES, SHORT),
            await llm.chat([MESSAGES, MESSAGES], SAMPLED),
            events,
        )

    two, (first,), one, many, events = run(main)
    expected = blocking.generate(["a fox", "a dog"], [SHORT, SAMPLED])
    assert list(map(outcome, two)) == list(map(outcome, expected))
    (plain,) = blocking.generate("a fox", several)
    assert [outcome(g) for g in (first, *first.others)] == [
        outcome(g) for g in (plain, *plain.others)
    ]
    assert outcome(one) == outcome(blocking.chat(MESSAGES, SHORT))
    assert list(map(outcome, many)) == [outcome(blocking.chat(MESSAGES, SAMPLED))] * 2
    whole = blocking.generate("a fox", SAMPLED)[0]
    assert outcome(events[-1].generation) == outcome(whole)
    assert "".join(event.text for event in events) == whole.text
    assert [event.generation is None for event in events[:-1]] == [True] * (len(events) - 1)


def test_32_tasks_of_which_some_are_cancelled(llm: AsyncLLM, blocking: LLM) -> None:
    """Texts equal to those one by one, and nothing is left of those that went away."""
    dice = random.Random(4)
    prompts = [[5 + number, 50, 60 + number] for number in range(32)]
    settings = [
        SamplingParams(
            max_tokens=dice.randint(5, 40), ignore_eos=True, temperature=float(i % 2), seed=i
        )
        for i in range(32)
    ]
    ways = [("stream", "leave", "cancel", "generate")[number % 4] for number in range(32)]

    async def ask(number: int) -> Generation | None:
        prompt, params = prompts[number], settings[number]
        if ways[number] == "generate":
            return (await llm.generate([prompt], params))[0]
        num_events = dice.randint(0, 4)
        endless = params if ways[number] == "stream" else ENDLESS
        async for event in llm.stream(prompt, endless):
            num_events -= 1
            if ways[number] == "leave" and num_events <= 0:
                return None
            last = event.generation
        return last

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(ask(number)) for number in range(32)]
        for number, task in enumerate(tasks):
            if ways[number] == "cancel":
                delay = dice.random() * 0.3
                asyncio.get_running_loop().call_later(delay, task.cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(main)
    for number, way in enumerate(ways):
        if way == "cancel":
            assert isinstance(found[number], asyncio.CancelledError)
        elif way == "leave":
            assert found[number] is None
        else:
            (alone,) = blocking.generate([prompts[number]], settings[number])
            assert outcome(found[number]) == outcome(alone)


def test_prompts_tools_and_forms_are_checked_before_the_engine(llm: AsyncLLM) -> None:
    async def refused(make: Callable[[], Any]) -> str:
        with pytest.raises(RequestError) as caught:
            await make()
        return str(caught.value)

    async def first_of(stream: Any) -> Any:
        return await anext(stream)

    async def main() -> list[str]:
        return [
            await refused(lambda: llm.generate([[5, -1]])),
            await refused(lambda: llm.generate(["good", ""])),
            await refused(lambda: llm.chat([])),
            await refused(lambda: llm.generate("a", grammar=GrammarSpec.regex("[a"))),
            await refused(lambda: first_of(llm.stream("a", SamplingParams(n=2, temperature=1)))),
            await refused(lambda: first_of(llm.stream("a", verify=99))),
            await refused(lambda: llm.generate("a", SHORT, sampling_params=SHORT)),
        ]

    said = run(main)
    for message, part in zip(
        said,
        ("Token id -1", "prompt is empty", "messages", "unclosed", "n is 2", "verify is 99", "one"),
        strict=True,
    ):
        assert part in message
    with pytest.raises(RequestError, match="generate.* has no request_id; here: "):
        llm.generate("a", request_id="1")
    with pytest.raises(AttributeError, match="abort.*async for event in llm.stream"):
        getattr(llm, "abo" + "rt")


def test_the_loop_stays_free_while_the_engine_computes(llm: AsyncLLM) -> None:
    async def main() -> int:
        ticks, task = 0, asyncio.create_task(llm.generate([[5, 6]] * 8, ENDLESS))
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
        return ticks

    assert run(main) > 100


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_events", range(4))
@pytest.mark.parametrize("way", ["break", "aclose", "with", "drop", "raise"])
def test_every_way_to_leave_cancels(llm: AsyncLLM, num_events: int, way: str) -> None:
    async def main() -> None:
        stream = llm.stream("a fox", ENDLESS)
        for _ in range(num_events):
            assert (await anext(stream)).generation is None
        if num_events:
            assert llm.engine.has_work
        if way == "break":
            async for _ in stream:
                break
            del stream
        elif way == "aclose":
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif way == "with":
            async with stream:
                await anext(stream)
        elif way == "raise":
            with contextlib.suppress(ZeroDivisionError):
                async for _ in stream:
                    raise ZeroDivisionError
            del stream
        else:
            del stream
        gc.collect()
        until = time.monotonic() + 20
        while llm.engine.has_work and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert not llm.engine.has_work

    run(main)


def test_a_cancelled_wait_cancels_all_of_its_requests(llm: AsyncLLM) -> None:
    async def main() -> None:
        for ask in (
            lambda: llm.generate([[5, 6], [7, 8]], ENDLESS),
            lambda: llm.chat(MESSAGES, ENDLESS),
        ):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(ask(), 0.3)

    run(main)


def test_a_loop_that_ends_takes_its_requests_along(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.stream("a fox", ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()
    until_idle_but_held(llm)
    del stream


def test_a_loop_that_ends_with_mail_unread_takes_its_requests_along() -> None:
    """It was told of the first event, and nobody looked: of the second it cannot be told."""

    async def new_mailbox() -> Mailbox:
        return Mailbox()

    loop = asyncio.new_event_loop()
    mailbox = loop.run_until_complete(new_mailbox())
    event = TokenEvent("a", (1,), "a", (False,))
    assert mailbox.put(event) and mailbox.put(event)
    loop.close()
    assert not mailbox.put(event)


def until_idle_but_held(llm: AsyncLLM) -> None:
    """The stream is still there: the thread itself finds that nobody listens."""
    until = time.monotonic() + 20
    while llm.engine.has_work and time.monotonic() < until:
        time.sleep(0.01)
    assert not llm.engine.has_work


def test_a_reader_that_is_slow_loses_nothing(llm: AsyncLLM, blocking: LLM) -> None:
    async def main() -> str:
        text = ""
        async for event in llm.stream("a fox", SAMPLED):
            await asyncio.sleep(0.02)
            text += event.text
        return text

    assert run(main) == blocking.generate("a fox", SAMPLED)[0].text


def test_one_stream_has_one_reader(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.stream("a fox", ENDLESS)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(FlashdraftError, match="Another task waits"):
            await anext(stream)
        assert (await first).generation is None
        await stream.aclose()

    run(main)


def test_several_loops_in_several_threads(llm: AsyncLLM, blocking: LLM) -> None:
    words = ("fox", "dog", "tree", "token")
    found: dict[str, list[str]] = {}

    def work(word: str) -> None:
        async def main() -> list[str]:
            asked = [llm.generate(f"the {word}", SAMPLED), llm.chat(MESSAGES, SAMPLED)]
            (one,), other = await asyncio.gather(*asked)
            return [one.text, other.text]

        found[word] = asyncio.run(main())

    threads = [threading.Thread(target=work, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    chat = blocking.chat(MESSAGES, SAMPLED).text
    for word in words:
        assert found[word] == [blocking.generate(f"the {word}", SAMPLED)[0].text, chat]


# -- failures --------------------------------------------------------------------------------------


def test_a_request_that_fails_costs_the_others_nothing(
    llm: AsyncLLM, blocking: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llm.engine.target.forward

    def broken(token_ids: torch.Tensor, batch: Any) -> Any:
        if 299 in token_ids.tolist():
            raise ValueError("boom")
        return forward(token_ids, batch)

    monkeypatch.setattr(llm.engine.target, "forward", broken)

    async def main() -> tuple[Any, ...]:
        good = asyncio.create_task(llm.generate("a fox", SHORT))
        with pytest.raises(FlashdraftError, match="ValueError: boom"):
            await llm.generate([[299]], SHORT)
        mixed = await llm.generate([[5, 6], [299]], SHORT)
        return (await good)[0], *mixed

    fox, fine, failed = run(main)
    assert outcome(fox) == outcome(blocking.generate("a fox", SHORT)[0])
    assert outcome(fine) == outcome(blocking.generate([[5, 6]], SHORT)[0])
    assert failed.finish_reason is FinishReason.ERROR


def test_an_engine_that_cannot_go_on_tells_everybody_and_begins_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(folder, draft=None, **OPTIONS)
    step, fails = llm.engine.step, [False]

    def broken() -> Any:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("torn")
        return step()

    monkeypatch.setattr(llm.engine, "step", broken)

    async def main() -> None:
        stream = llm.stream("a fox", ENDLESS)
        await anext(stream)
        other = asyncio.create_task(llm.generate("a dog", ENDLESS))
        await asyncio.sleep(0.1)
        fails[0] = True
        with pytest.raises(FlashdraftError, match="RuntimeError: torn; ask again"):
            async for _ in stream:
                pass
        with pytest.raises(FlashdraftError, match="RuntimeError: torn; ask again"):
            await other
        assert len((await llm.generate("a fox", SHORT))[0].token_ids) == 12

    run(main)
    llm.close()


def test_a_dead_engine_tells_every_waiter_and_whoever_comes_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(folder, draft=None, **OPTIONS)
    dies = [False]
    step = llm.engine.step

    def deadly() -> Any:
        if dies[0]:
            raise SystemExit("gone")
        return step()

    monkeypatch.setattr(llm.engine, "step", deadly)

    async def main() -> None:
        stream = llm.stream("a fox", ENDLESS)
        await anext(stream)
        waiting = [asyncio.create_task(llm.generate("a dog", ENDLESS)) for _ in range(5)]
        await asyncio.sleep(0.2)
        dies[0] = True
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, EngineLostError) and "SystemExit: gone" in str(one)
        with pytest.raises(EngineLostError, match="make a new AsyncLLM"):
            async for _ in stream:
                pass
        for _ in range(3):
            with pytest.raises(EngineLostError, match="SystemExit: gone"):
                await llm.generate("a fox", SHORT)

    run(main)
    llm.close()


# -- the end ---------------------------------------------------------------------------------------


def test_close_ends_everything(folder: Path) -> None:
    async def main() -> tuple[AsyncLLM, list[weakref.ref[Any]]]:
        async with AsyncLLM(folder, draft=None, **OPTIONS) as llm:
            waiting = [asyncio.create_task(llm.generate("a dog", ENDLESS)) for _ in range(3)]
            stream = llm.stream("a fox", ENDLESS)
            await anext(stream)
            kept = [weakref.ref(one) for one in (llm.engine, llm.engine.target, llm.engine.cache)]
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, EngineLostError) and "is closed" in str(one)
        with pytest.raises(EngineLostError):
            async for _ in stream:
                pass
        with pytest.raises(EngineLostError, match="This AsyncLLM is closed; make a new one"):
            await llm.generate("a fox")
        return llm, kept

    llm, kept = run(main)
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    assert not llm._thread._thread.is_alive() and repr(llm).endswith(", closed)")
    llm.close()


def test_one_that_was_never_asked_can_be_closed(folder: Path) -> None:
    llm = AsyncLLM(folder, draft=None, **OPTIONS)
    llm.close()
    with pytest.raises(EngineLostError):
        asyncio.run(llm.generate("a"))


def test_one_that_nobody_holds_ends_its_thread(folder: Path) -> None:
    llm = AsyncLLM(folder, draft=None, **OPTIONS)
    asyncio.run(llm.generate("a fox", SHORT))
    thread, engine = llm._thread._thread, weakref.ref(llm.engine)
    assert thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive() and engine() is None


@pytest.mark.parametrize("ending", ["", "stream = None", "llm.close()", "sys.exit(0)", "1 / 0"])
def test_python_ends_in_the_middle_of_an_answer(folder: Path, ending: str) -> None:
    script = f"""
import asyncio, sys
from flashdraft import AsyncLLM, SamplingParams
llm = AsyncLLM(sys.argv[1], device="cpu", dtype="float32", draft=None, cache_gb=0.01)
async def main():
    global stream
    stream = llm.stream("a fox", SamplingParams(max_tokens=None, ignore_eos=True))
    await anext(stream)
    {ending}
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (1 if ending == "1 / 0" else 0), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (ending == "1 / 0")
    assert ending == "1 / 0" or done.stderr == ""


def test_a_forked_process_is_told_that_the_thread_is_not_there(folder: Path) -> None:
    script = """
import asyncio, os, sys
from flashdraft import AsyncLLM, SamplingParams, FlashdraftError
llm = AsyncLLM(sys.argv[1], device="cpu", dtype="float32", draft=None, cache_gb=0.01)
ask = lambda: asyncio.run(llm.generate("a fox", SamplingParams(max_tokens=4)))
before = ask()[0].text
if (child := os.fork()) == 0:
    try:
        ask()
    except FlashdraftError as error:
        sys.exit("belongs to the process that made it" not in str(error))
    os._exit(5)
assert os.waitpid(child, 0)[1] == 0
assert ask()[0].text == before
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
