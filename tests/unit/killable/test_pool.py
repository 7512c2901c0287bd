"""Processes that go beyond their limits are killed; the questions of others are answered."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashdraft.errors import CapacityError, FlashdraftError
from flashdraft.killable import pool as pool_module
from flashdraft.killable.pool import (
    First,
    FirstError,
    Limits,
    ProcessPool,
    ProcessStoppedError,
    RefusedError,
    StartError,
)

pytestmark = pytest.mark.alone  # limits in wall time, of several processes

CHILD = "tests.unit.killable.echo_child"
LIMITS = Limits(0.5, 128)


@pytest.fixture(autouse=True)
def this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    made = make_pool()
    yield made
    made.close()


def make_pool(child: str = CHILD, **first: Any) -> ProcessPool:
    return ProcessPool(child, lambda: First({"type": "load", **first}, LIMITS), work="echoes")


def echo(pool: ProcessPool, value: Any = 1) -> dict[str, Any]:
    return pool.ask({"type": "echo", "value": value}, LIMITS)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_question_is_answered_and_the_process_stays(pool: ProcessPool) -> None:
    values = ["", "ä\ud800 \U0001f642", [1, None, {"a": 1.5}], "x" * 3_000_000]
    answers = [echo(pool, value) for value in values]
    assert [one["value"] for one in answers] == values
    assert len({one["pid"] for one in answers}) == 1


def test_a_payload_arrives_as_it_was_sent(pool: ProcessPool) -> None:
    for payload in (b"\0", bytes(range(256)) * 10_000):
        answer = pool.ask({"type": "weigh"}, LIMITS, data=payload)
        assert bytes.fromhex(answer["value"]) == payload
    with pytest.raises(ProcessStoppedError):  # one that ends before it has taken all
        pool.ask({"type": "crash"}, LIMITS, data=bytes(1 << 24))
    assert echo(pool)["value"] == 1


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"type": "spin"}, "it ran for more than 0.5 s"),
        ({"type": "crash"}, r"crashed \(SIGSEGV\)"),
        ({"type": "allocate", "bytes": 1 << 30}, None),
        ({"type": "flood", "bytes": 65 * 1024 * 1024}, None),
    ],
)
def test_what_goes_too_far_is_stopped(
    pool: ProcessPool, message: dict[str, Any], why: str | None
) -> None:
    before = echo(pool)["pid"]
    if why is not None:
        with pytest.raises(ProcessStoppedError, match=why):
            pool.ask(message, LIMITS)
    else:
        with pytest.raises(
            RefusedError, match="needed more than 128 MiB|makes too much"
        ) as refused:
            pool.ask(message, LIMITS)
        assert refused.value.kind == "limit"
    assert not is_running(before)
    assert echo(pool)["pid"] != before


def test_a_process_that_is_stopped_by_a_signal_is_given_up(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_MIN_WALL_S", 1.0)
    os.kill(echo(pool)["pid"], signal.SIGSTOP)
    with pytest.raises(CapacityError, match="did not answer in time"):
        pool.ask({"type": "echo", "value": 1}, Limits(0.1, 128))
    assert echo(pool, 5)["value"] == 5


def test_killing_one_loses_no_other(pool: ProcessPool) -> None:
    outcomes: dict[str, Any] = {}

    def ask(name: str, message: dict[str, Any]) -> None:
        try:
            outcomes[name] = pool.ask(message, LIMITS)
        except FlashdraftError as error:
            outcomes[name] = str(error)

    work = {"bad": {"type": "spin"}, "good": {"type": "sleep", "seconds": 1.0}}
    threads = [threading.Thread(target=ask, args=item) for item in work.items()]
    threads += [
        threading.Thread(target=ask, args=(str(n), {"type": "echo", "value": n})) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "ran for more" in outcomes.pop("bad")
    assert outcomes.pop("good")["pid"]
    assert {name: one["value"] for name, one in outcomes.items()} == {str(n): n for n in range(8)}


def test_long_questions_leave_a_process_free(pool: ProcessPool) -> None:
    def ask_long() -> None:
        pool.ask({"type": "sleep", "seconds": 1.0}, LIMITS, is_long=True)

    echo(pool)
    threads = [threading.Thread(target=ask_long) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    echo(pool)  # starts the second process
    begin = time.monotonic()
    echo(pool)
    assert time.monotonic() - begin < 0.5
    assert any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(30)


def test_a_process_that_died_in_its_sleep_is_replaced_unnoticed(pool: ProcessPool) -> None:
    pid = echo(pool)["pid"]
    os.kill(pid, signal.SIGKILL)
    while is_running_child(pid):
        time.sleep(0.01)
    assert echo(pool, "again")["value"] == "again"


def is_running_child(pid: int) -> bool:
    """Whether a child has not ended; one that has and was not waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_keeps_too_much_is_replaced(pool: ProcessPool) -> None:
    first = echo(pool)["pid"]
    for _ in range(3):
        pool.ask({"type": "keep", "bytes": 16 << 20}, LIMITS)
    assert echo(pool)["pid"] == first
    pool.ask({"type": "keep", "bytes": 40 << 20}, LIMITS)
    assert echo(pool)["pid"] != first


def test_a_first_message_can_be_refused() -> None:
    pool = make_pool(refuse=True)
    for _ in range(3):  # more often than there are places
        with pytest.raises(FirstError, match="I will not") as refused:
            echo(pool)
        assert refused.value.kind == "checkpoint"
    pool.close()


def test_a_first_message_that_takes_too_much_is_no_fault_of_the_question() -> None:
    pool = make_pool(spin=True)
    with pytest.raises(FirstError, match="it ran for more than 0.5 s") as stopped:
        echo(pool)
    assert stopped.value.kind == "limit"
    pool.close()


def test_a_process_that_is_killed_at_its_first_message_is_started_again() -> None:
    pool = make_pool(die=True)
    for ask in (pool.start, lambda: echo(pool)):
        with pytest.raises(CapacityError, match="A process that echoes was killed twice"):
            ask()
    pool.close()


@pytest.mark.parametrize(
    ("child", "why"),
    [
        (
            "no_such_package.child",
            r"code 1.*ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("tests.unit.killable.broken_child", r"code \d+ \(.*nois"),
    ],
)
def test_a_process_that_cannot_begin_tells_why(child: str, why: str) -> None:
    pool = make_pool(child)
    with pytest.raises(
        StartError, match=f"A process that echoes cannot be started: .*{why}"
    ) as told:
        echo(pool)
    assert len(str(told.value)) < 500 and str(told.value).isprintable()
    pool.close()


def test_what_a_process_says_later_is_not_waited_for(pool: ProcessPool) -> None:
    pid = echo(pool)["pid"]
    assert pool.ask({"type": "say", "bytes": 1 << 20}, LIMITS)["pid"] == pid


def test_a_process_finds_what_is_installed_for_its_user(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"HOME": "/other", "PYTHONUSERBASE": "/base", "PYTHONNOUSERSITE": ""}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    told = pool.ask({"type": "environment"}, LIMITS)["environment"]
    assert {name: told.get(name) for name in names} == names


def test_a_warm_pool_replaces_what_was_killed_at_once(pool: ProcessPool) -> None:
    pool.warm()
    wait_for(lambda: len(pool._idle) == 2)
    with pytest.raises(CapacityError, match="killed twice"):
        pool.ask({"type": "die"}, LIMITS)
    wait_for(lambda: len(pool._idle) == 2)


def test_the_next_question_makes_up_for_a_start_that_failed(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.warm()
    wait_for(lambda: len(pool._idle) == 2)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_restock_later", lambda: None)  # as if it had been tried
        os.kill(pool._idle[0]._child.pid, signal.SIGKILL)
        wait_for(lambda: not pool._idle[0].is_alive)
        assert pool.ask({"type": "environment"}, LIMITS)
    assert len(pool._all) == 1
    assert pool.ask({"type": "environment"}, LIMITS)
    wait_for(lambda: len(pool._idle) == 2)


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_closing_ends_what_runs_and_tells_whoever_waits(pool: ProcessPool) -> None:
    failures: list[str] = []

    def ask() -> None:
        try:
            pool.ask({"type": "sleep", "seconds": 60}, Limits(60, 128))
        except CapacityError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(pool._all) == 2)
    time.sleep(0.2)
    pool.close()
    for thread in threads:
        thread.join(10)
    assert len(failures) == 4
    with pytest.raises(CapacityError, match="ending"):
        echo(pool)


def test_processes_end_with_the_pool() -> None:
    pool = make_pool()
    pid = echo(pool)["pid"]
    pool.rest()
    assert not is_running(pid)
    pid = echo(pool)["pid"]
    del pool
    gc.collect()
    assert not is_running(pid)


def test_an_interrupt_leaves_no_half_answer(pool: ProcessPool) -> None:
    pid = echo(pool)["pid"]
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.ask({"type": "sleep", "seconds": 30}, LIMITS)
    assert not is_running(pid)
    assert echo(pool, "mine")["value"] == "mine"


def test_a_fork_has_processes_of_its_own(pool: ProcessPool) -> None:
    ours = echo(pool)["pid"]
    child = os.fork()
    if child == 0:
        is_other = False
        try:
            is_other = echo(pool)["pid"] != ours
            pool.close()
        finally:
            os._exit(0 if is_other else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert echo(pool)["pid"] == ours


def test_a_fork_during_a_long_question_can_ask_long_ones(pool: ProcessPool) -> None:
    asking = threading.Thread(
        target=lambda: pool.ask({"type": "sleep", "seconds": 2.0}, LIMITS, is_long=True)
    )
    asking.start()
    wait_for(lambda: len(pool._all) == 1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            pool.ask({"type": "echo", "value": 1}, LIMITS, is_long=True)
            pool.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    asking.join(30)


def test_a_mistake_in_a_child_is_told(pool: ProcessPool) -> None:
    with pytest.raises(RefusedError, match="KeyError: 'value'") as refused:
        pool.ask({"type": "echo"}, LIMITS)
    assert refused.value.kind == "bug"


def test_a_child_has_no_secrets_no_torch_and_no_files(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ["PYTHONPATH"]]))
    told = pool.ask({"type": "environment"}, LIMITS)
    assert "HF_TOKEN" not in told["environment"]
    assert "torch" not in told["modules"] and "" not in told["path"] and "." not in told["path"]
    target = tmp_path / "written"
    with pytest.raises(RefusedError, match="File too large"):
        pool.ask({"type": "write", "path": str(target)}, LIMITS)
    assert not target.exists() or target.read_text() == ""
