"""Code that means harm: it is refused what it tries, does not pass, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashdraft.bench.accuracy import confined, sandbox
from flashdraft.bench.accuracy.sandbox import CodeTest, NoSandboxError, SandboxLimits, passes

pytestmark = [
    pytest.mark.alone,  # limits in wall time, of several processes
    pytest.mark.skipif(
        sandbox.sandbox_problem() is not None, reason="this machine cannot confine code"
    ),
]
TESTS = "assert double(2) == 4\nassert double(-3) == -6"
RIGHT = "def double(x):\n    return 2 * x\n"
SHORT = SandboxLimits(wall_s=3.0, cpu_s=1)

# Every one answers double wrongly or not at all, and tries to pass all the same.
CHEATS = {
    "wrong": "def double(x): return 5",
    "nothing": "",
    "syntax error": "def double(x: return 2 * x",
    "exits well at once": "import sys\nsys.exit(0)",
    "exits well when called": "import sys\ndef double(x): sys.exit(0)",
    "ends the process": "import os\nos._exit(0)",
    "ends the process when called": "import os\ndef double(x): os._exit(0)",
    "raises SystemExit": "def double(x): raise SystemExit(0)",
    "prints the verdict": (
        "import os\nprint('passed')\n"
        "for descriptor in range(64):\n"
        "    try: os.write(descriptor, b'passed')\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "equals everything": (
        "class Any:\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "def double(x): return Any()"
    ),
    "an int that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\ndef double(x): return Any(1)"
    ),
    "no assertion fails": (
        "import builtins\n"
        "class Never(BaseException): pass\n"
        "builtins.AssertionError = Never\n"
        "builtins.compile = builtins.exec = lambda *a, **k: None\n"
        "def double(x): return 5"
    ),
    "patches unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef double(x): return 5"
    ),
    "rewrites the frames above": (
        "import sys, gc\n"
        "for thing in gc.get_objects():\n"
        "    if isinstance(thing, dict) and 'tests' in thing: thing['tests'] = ''\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    frame.f_globals['run_judge'] = lambda *a: None\n"
        "    frame = frame.f_back\n"
        "def double(x): return 5"
    ),
    "answers by hand": (
        "import os\n"
        "for descriptor in range(3, 64):\n"
        '    try: os.write(descriptor, b\'{"value": null}\\n{"value": {"yours": 0}}\\n\')\n'
        "    except OSError: pass\n"
    ),
    "replaces what the tests use": "def double(x): return 5\ndef abs(x): return 0",
    "nests for ever": (
        "def double(x):\n    value = []\n    for _ in range(100000): value = [value]\n"
        "    return value"
    ),
    "crashes": "import sys\nsys.setrecursionlimit(10**9)\ndef double(x): return double(x) + 1",
}


def test_right_code_passes() -> None:
    assert passes(CodeTest([RIGHT], TESTS))


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
def test_cheating_does_not_pass(code: str) -> None:
    tests = TESTS + "\nassert abs(double(1) - 2) == 0"
    assert not passes(CodeTest([code], tests), SandboxLimits(wall_s=10.0, cpu_s=3))


# What each tries is refused, which the answer itself reports.
REFUSED = {
    "reads a file": "open('/etc/hostname').read()",
    "reads the source": "open(os.__file__).read()",
    "writes a file": "open('left.txt', 'w').write('x')",
    "removes a file": "os.remove(TARGET)",
    "renames a file": "os.rename(TARGET, TARGET + '.gone')",
    "makes a folder": "os.mkdir('folder')",
    "changes the mode": "os.chmod(TARGET, 0)",
    "lists a folder": "os.listdir('/')",
    "forks": "os.fork()",
    "starts a program": "os.posix_spawn('/bin/sh', ['sh'], {})",
    "becomes a program": "os.execv('/bin/sh', ['sh', '-c', 'true'])",
    "starts a thread": "threading.Thread(target=print).start()",
    "signals its parent": "os.kill(PARENT, 9)",
    "signals its group": "os.killpg(0, 9)",
    "reads its parent's environment": "open(f'/proc/{PARENT}/environ', 'rb').read()",
    "reads its parent's memory": "open(f'/proc/{PARENT}/mem', 'rb').read(1)",
    "raises its limits": "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
}


def test_what_harms_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("here")
    code = (
        "import os, sys, threading\n"
        "resource = sys.modules['resource']\n"
        f"TARGET, PARENT, ATTEMPTS = {str(victim)!r}, {os.getpid()}, {REFUSED!r}\n"
        "def done(name):\n"
        "    try: exec(ATTEMPTS[name], globals())\n"
        "    except (OSError, RuntimeError, ValueError): return False\n"
        "    return True\n"
    )
    tests = f"assert [name for name in {list(REFUSED)!r} if done(name)] == []"
    assert passes(CodeTest([code], tests))
    assert victim.read_text() == "here"
    # that an attempt can be told from a refusal
    assert not passes(CodeTest([code.replace("os.fork()", "os.getpid()")], tests))


def test_an_answer_has_the_standard_library_and_nothing_else() -> None:
    code = (
        "from datetime import datetime\nimport collections, heapq, math, re, statistics, typing\n"
        "def year(text): return datetime.strptime(text, '%d %B %Y').year\n"
        "def has_numpy():\n"
        "    try: import numpy\n"
        "    except ImportError: return False\n"
        "    return True\n"
    )
    assert passes(CodeTest([code], "assert year('3 May 1999') == 1999\nassert not has_numpy()"))


def test_the_kernel_is_asked_directly_in_vain() -> None:
    """With ctypes an answer can call the kernel as it likes: sockets and other processes too."""
    code = (
        "import sys, os\n"
        "ctypes = sys.modules['ctypes']\n"
        "library = ctypes.CDLL(None, use_errno=True)\n"
        "def errors():\n"
        "    found = []\n"
        "    for name, *rest in (('socket', 2, 1, 0), ('ptrace', 16, os.getpid(), 0, 0),\n"
        "                        ('unshare', 0), ('mount', 0, 0, 0, 0, 0), ('setuid', 0)):\n"
        "        ctypes.set_errno(0)\n"
        "        getattr(library, name)(*rest)\n"
        "        found.append(ctypes.get_errno())\n"
        "    return found\n"
    )
    assert passes(CodeTest([code], "assert errors() == [1] * 5"))


def test_environment_and_folder_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDRAFT_SECRET", "secret")
    code = "import os\ndef names(): return sorted(os.environ)"
    # the C locale is Python's own doing
    assert passes(CodeTest([code], "assert set(names()) <= {'LC_CTYPE'}"))


def test_endless_loops_are_ended() -> None:
    began = time.monotonic()
    assert not passes(CodeTest(["while True: pass"], TESTS), SHORT)
    assert not passes(CodeTest(["import time\ntime.sleep(1000)"], TESTS), SHORT)
    assert not passes(CodeTest(["def double(x):\n    while True: pass"], TESTS), SHORT)
    assert time.monotonic() - began < 3 * SHORT.wall_s + 10
    assert children_left() == []


def test_fork_bombs_and_floods_do_nothing() -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    flood = "while True: print('x' * 1000000)"
    swamp = (
        "import os\nwhile True:\n"
        "    for descriptor in range(3, 16):\n"
        "        try: os.write(descriptor, b'x' * 65536)\n"
        "        except OSError: pass"
    )
    for code in (bomb, flood, swamp):
        assert not passes(CodeTest([code], TESTS), SHORT)
    assert children_left() == []


def test_memory_is_limited() -> None:
    greedy = "def attempt():\n    try: bytearray(10 << 30)\n    except MemoryError: return 'none'"
    assert passes(CodeTest([greedy], "assert attempt() == 'none'"))
    assert not passes(CodeTest(["text = 'x' * (10 << 30)\n" + RIGHT], TESTS))


def test_values_cross_as_they_are() -> None:
    code = (
        "import collections, decimal, fractions\n"
        "Point = collections.namedtuple('Point', 'x y')\n"
        "class Pair:\n"
        "    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def same(value): return value\n"
        "def kind(value): return type(value).__name__\n"
        "def total(pairs): return sum(pair.a * pair.b for pair in pairs)\n"
        "def count(n):\n    for number in range(n): yield number\n"
        "def point(): return Point(1, 2)\n"
        "def fail(): raise ValueError('no')\n"
        "class Odd(Exception): pass\n"
        "def fail_oddly(): raise Odd('no')\n"
    )
    tests = (
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "values = [None, True, 10**5000, 0.1, float('inf'), 'a\\n\\ud800é', b'\\x00\\xff', 1+2j,\n"
        "          (1, (2,)), {1, 2}, frozenset({3}), {'a': [1], (2, 3): {4}}, range(1, 9, 2),\n"
        "          Decimal('1.10'), Fraction(1, 3), []]\n"
        "for value in values:\n"
        "    assert same(value) == value and kind(value) == type(value).__name__, value\n"
        "assert same(float('nan')) != 0\n"
        "assert total([Pair(2, 3), Pair(4, b=5)]) == 26\n"
        "assert count(3) != [0, 1, 2] and list(count(3)) == [0, 1, 2]\n"
        "assert point() == (1, 2)\n"
        "for call, wanted in ((fail, ValueError), (fail_oddly, RuntimeError)):\n"
        "    try: call()\n"
        "    except wanted: pass\n"
        "    else: raise AssertionError\n"
    )
    assert passes(CodeTest([code], tests))


def test_the_answer_cannot_change_what_the_setup_defines() -> None:
    answer = "def helper(x): return 4\ndef double(x): return 5"
    setup, tests = "def helper(x): return x\ndef double(x): pass", "assert helper(double(2)) == 4"
    assert not passes(CodeTest([answer], tests, setup=setup, names=["double"]))
    assert passes(CodeTest([RIGHT], tests, setup=setup, names=["double"]))


def test_nothing_is_run_where_code_cannot_be_confined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Path(confined.__file__).read_text()
    broken = tmp_path / "confined.py"
    broken.write_text(source.replace("_FILTER_MODE = 2", "_FILTER_MODE = 77"))
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    with pytest.raises(NoSandboxError, match="cannot be confined"):
        passes(CodeTest([RIGHT], TESTS))
    sandbox.sandbox_problem.cache_clear()
    assert "seccomp" in str(sandbox.sandbox_problem())
    monkeypatch.undo()
    sandbox.sandbox_problem.cache_clear()
    assert sandbox.sandbox_problem() is None


def test_both_machines_have_a_number_for_every_call() -> None:
    assert list(confined.MACHINES) == ["x86_64", "aarch64"]
    for column in range(2):
        numbers = [both[column] for both in confined.CALLS.values()]
        assert len(set(numbers)) == len(numbers)


def test_children_end_with_the_process_that_started_them() -> None:
    program = (
        "from flashdraft.bench.accuracy.sandbox import *\n"
        "passes(CodeTest(['import time\\ntime.sleep(600)'], ''), SandboxLimits(wall_s=600))"
    )
    starter = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while len(found := children_left(starter.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)  # until they are confined
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 30
    while any(map(is_confined, found)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(found) == 2 and not any(map(is_confined, found))


def is_confined(number: int) -> bool:
    try:
        return b"confined.py" in Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return False


def children_left(parent: int | None = None) -> list[int]:
    """The processes of the sandbox that a process has started and that still run."""
    parent = parent or os.getpid()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(status[1]) == parent and is_confined(int(folder.name)):
            found.append(int(folder.name))
    return found
