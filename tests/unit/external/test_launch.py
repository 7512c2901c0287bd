"""An engine's life, with an engine that obeys: start, health, signals, crashes, and no orphans."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashdraft.errors import FlashdraftError
from flashdraft.external import launch
from flashdraft.external.command import EngineCommand
from flashdraft.external.launch import Health, run_engine
from tests.unit.external.fake_engine import MODULES, are_gone, make_engine, read_record


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "POLL_S", 0.02)
    monkeypatch.setattr(launch, "TERMINATE_S", 0.5)
    # where progress is not what is tested, a machine that stalls must not bring it about
    monkeypatch.setattr(launch, "REPORT_EVERY_S", 3600.0)


class Run:
    """One run of the fake engine, and what was said about it."""

    def __init__(self, folder: Path, how: str = "serve") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.record_path = folder / "record.json"
        python = make_engine(folder)
        arguments = (str(python), "-m", MODULES["vllm"], "--port", str(port), "--fake", how)
        self.command = EngineCommand(arguments, {"FAKE_RECORD": str(self.record_path)})
        self.health = Health(f"http://127.0.0.1:{port}/health")
        self.reports: list[str] = []
        self.num_ready = 0
        self.signals = [signal.SIGTERM]

    def on_ready(self) -> None:
        self.num_ready += 1
        for number in self.signals:
            os.kill(os.getpid(), number)

    def run(self) -> int:
        return run_engine(self.command, self.health, "Fake 1.0", self.on_ready, self.reports.append)

    @property
    def pids(self) -> list[int]:
        pids: list[int] = read_record(self.record_path)["pids"]
        return pids


def test_a_signal_ends_the_engine_and_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one = Run(tmp_path)
    assert one.run() == 0
    assert one.num_ready == 1
    assert are_gone(one.pids)  # its child ignores SIGTERM
    assert one.reports == ["Ending Fake 1.0; the same signal again ends it at once."]
    assert "fake engine: loading" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [("crash", 3, "ValueError: no room for the cache"), ("refuse", 1, "Value error, too long")],
)
def test_a_crash_at_the_start_is_one_line_with_the_reason(
    tmp_path: Path, how: str, status: int, reason: str
) -> None:
    one = Run(tmp_path, how)
    assert one.run() == status
    assert one.num_ready == 0
    assert one.reports == [f"Fake 1.0 ended with status {status} before it was ready: {reason}"]
    assert are_gone(one.pids)


def test_a_crash_later_is_told_with_its_status(tmp_path: Path) -> None:
    one = Run(tmp_path, "dies")
    one.signals = []
    assert one.run() == 5
    assert one.num_ready == 1
    assert one.reports == [
        "Fake 1.0 ended by itself with status 5: torch.OutOfMemoryError: it grew"
    ]
    assert are_gone(one.pids)


def test_a_second_signal_ends_a_stubborn_engine_at_once(tmp_path: Path) -> None:
    one = Run(tmp_path, "stubborn")
    one.signals = [signal.SIGTERM, signal.SIGTERM]
    assert one.run() == 128 + signal.SIGKILL
    assert are_gone(one.pids)


def test_an_engine_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DRAIN_S", 0.3)
    one = Run(tmp_path, "stubborn")
    assert one.run() == 128 + signal.SIGKILL
    assert are_gone(one.pids)


def test_a_signal_while_it_loads_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Run(tmp_path, "slow")
    checks: list[int] = []

    def stop_soon(health: Health) -> bool:
        if one.record_path.exists() and not checks:
            checks.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return False

    monkeypatch.setattr(Health, "is_good", stop_soon)
    assert one.run() != 0
    assert one.num_ready == 0
    assert not any("before it was ready" in report for report in one.reports)
    assert are_gone(one.pids)


def test_progress_is_told_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REPORT_EVERY_S", 0.05)
    one = Run(tmp_path)
    answers = iter([False] * 10 + [True])
    monkeypatch.setattr(Health, "is_good", lambda health: next(answers))
    one.run()
    assert any("still loading" in report for report in one.reports)


@pytest.mark.parametrize("how", ["sick", "hung"])
def test_an_engine_that_never_is_healthy_is_waited_for_until_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Weights may take an hour to fetch: there is no limit, but it is told, and can be ended."""
    monkeypatch.setattr(launch, "REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(launch, "HEALTH_S", 0.1)
    one = Run(tmp_path, how)

    def report(line: str) -> None:
        one.reports.append(line)
        # it listens by now, as far as it ever will
        if len(one.reports) == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    run_engine(one.command, one.health, "Fake 1.0", one.on_ready, report)
    assert one.num_ready == 0
    assert all("still loading" in line for line in one.reports[:20])
    assert one.reports[20:] == ["Ending Fake 1.0; the same signal again ends it at once."]
    assert are_gone(one.pids)


def test_a_flood_of_output_passes_and_the_reason_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line without end, a line that a search could dwell on, and very many lines."""
    passed = 0

    class Counter(io.StringIO):
        def write(self, text: str) -> int:
            nonlocal passed
            passed += len(text)
            assert len(text) <= 1 << 20, "it was gathered before it was passed on"
            return len(text)

    monkeypatch.setattr(sys, "stderr", Counter())
    one = Run(tmp_path, "flood")
    began = time.monotonic()
    assert one.run() == 1
    assert one.reports == [
        "Fake 1.0 ended with status 1 before it was ready: ValueError: and this is why"
    ]
    assert passed > 30_000_000 + 200_000 * 30
    assert time.monotonic() - began < 60


def test_output_that_nobody_reads_does_not_stop_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        one = Run(tmp_path, "flood")
        assert one.run() == 1
        assert one.reports[0].endswith("ValueError: and this is why")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is buffered goes somewhere


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="strays are found by /proc")
def test_what_leaves_the_group_is_ended_too(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = Run(tmp_path, "stray")
    assert one.run() == 0
    assert len(one.pids) == 3 and are_gone(one.pids)
    assert other.poll() is None  # it was there before, and is none of the engine's
    other.communicate(b"\n")


def test_a_further_node_is_ready_without_health(tmp_path: Path) -> None:
    one = Run(tmp_path, "slow")
    status = run_engine(one.command, None, "Fake 1.0", one.on_ready, one.reports.append)
    assert one.num_ready == 1
    assert status == 128 + signal.SIGTERM


def test_the_engine_ends_when_we_are_killed(tmp_path: Path) -> None:
    one = Run(tmp_path)
    program = (
        "import sys; from flashdraft.external.launch import run_engine\n"
        "from flashdraft.external.command import EngineCommand\n"
        "run_engine(EngineCommand(tuple(sys.argv[1:])), None, 'Fake', lambda: None, print)"
    )
    ours = subprocess.Popen(
        [sys.executable, "-c", program, *one.command.arguments],
        env={**os.environ, **one.command.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        engine, child = one.pids
    finally:
        ours.kill()
        ours.wait()
    assert are_gone([engine])
    os.kill(child, signal.SIGKILL)  # the fake's own child hears of nothing


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = EngineCommand((str(tmp_path / "nothing"), "serve"))
    with pytest.raises(FlashdraftError, match=r"cannot be started: .*nothing: No such file"):
        run_engine(command, None, "Fake", lambda: None, print)


def test_a_key_is_not_printed() -> None:
    command = EngineCommand(("run", "--api-key", "se cret"), {"KEY": "se cret"}, secret="se cret")
    assert command.shown() == 'KEY="$FLASHDRAFT_API_KEY" run --api-key "$FLASHDRAFT_API_KEY"'
