"""The two processes in which an answer's code meets its tests: `python -I -S confined.py ROLE`.

The *answer* runs code that a model wrote and answers calls of its functions; the *judge* runs the
tests and calls those functions from a distance. Only plain values pass between them and only the
judge tells a verdict, so nothing an answer does to its own interpreter can make it pass. Each
process first gives up all it does not need: it can compute, and read and write the pipes it was
given, and nothing else. It opens no file, so the modules an answer may import are loaded before.

It is started by sandbox.py and imports nothing of the package, nor anything that was installed.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import IO, Any

EXIT_OPEN = 97  # the process cannot be confined here, so nothing was run
MAX_MESSAGE = 16 << 20  # bytes of one call or its result
MAX_ITEMS = 100_000  # of what an iterator yields

# What an answer may import: the standard library's modules for computing, and what they load late.
MODULES = """
    abc argparse array ast base64 binascii bisect calendar cmath codecs collections collections.abc
    contextlib copy csv dataclasses datetime _strptime decimal difflib enum fractions functools gc
    graphlib hashlib heapq html inspect io ipaddress itertools json keyword locale logging math
    numbers operator os os.path pathlib pickle pprint queue random re reprlib secrets shlex
    statistics string struct sys textwrap threading time timeit traceback types typing unicodedata
    unittest unittest.mock uuid warnings weakref zlib encodings.ascii encodings.cp1252
    encodings.idna encodings.latin_1 encodings.utf_16 encodings.utf_32 encodings.utf_8_sig
"""

# What a process may still ask of the kernel, by the numbers of the machines. Everything else is
# refused: files, processes, threads, sockets, signals to others, other processes' memory.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as a filter is told
CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "times": (100, 153),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
}
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_FILTER_MODE = 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the kernel's filter machine
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # refuse: with EPERM
_CALL_NUMBER, _MACHINE = 0, 4  # offsets in what a filter is given


# -- giving up what is not needed ------------------------------------------------------------------


def confine(cpu_s: int, memory_bytes: int) -> None:
    """Give up everything but computing and the open pipes; ends the process where it cannot."""
    for name in MODULES.split():
        with contextlib.suppress(ImportError):  # another Python may have fewer
            importlib.import_module(name)
    try:
        _limit(resource.RLIMIT_CPU, cpu_s)
        _limit(resource.RLIMIT_AS, memory_bytes)
        for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
            _limit(kind, 0)
        _install_filter()
    except (OSError, ValueError, KeyError, AttributeError):
        os._exit(EXIT_OPEN)


def _limit(kind: int, most: int) -> None:
    """Lower a limit for good; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (value, value))


def _install_filter() -> None:
    machine = platform.machine()
    code, column = MACHINES[machine], list(MACHINES).index(machine)
    numbers = [both[column] for both in CALLS.values()]
    last = len(numbers)  # distance from the first comparison to the refusal
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_JUMP_EQUAL, 1, 0, code),  # a program of another machine has other numbers
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _CALL_NUMBER),
        *((_JUMP_EQUAL, last - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, first, second in (
        (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0),
        (_PR_SET_NO_NEW_PRIVS, 1, 0),
        (_PR_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(header)),
    ):
        numbers_given = [ctypes.c_ulong(number) for number in (first, second, 0, 0)]
        if prctl(ctypes.c_int(option), *numbers_given) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


# -- plain values ----------------------------------------------------------------------------------


class Kept:
    """A value that stays in the other process: a name for it, and equal to nothing else."""

    def __init__(self, number: int) -> None:
        self.number = number


class Codec:
    """Values to JSON and back; what is not plain is kept here and only its number sent."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def encode(self, value: Any) -> Any:
        """A value for the wire. A subclass of a plain type goes as that type."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, Mapping):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        for kind in (tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(item) for item in value]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, Decimal | Fraction):
            return {type(value).__name__: str(value)}
        if isinstance(value, Kept):
            return {"yours": value.number}
        if isinstance(value, Iterator):
            return {"iterator": [self.encode(one) for one in itertools.islice(value, MAX_ITEMS)]}
        self._kept.append(value)
        return {"mine": len(self._kept) - 1}

    def decode(self, data: Any) -> Any:
        """The value again."""
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind in ("tuple", "set", "frozenset", "iterator"):
            make: Any = iter if kind == "iterator" else getattr(builtins, kind)
            return make([self.decode(item) for item in content])
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind in ("complex", "range"):
            return getattr(builtins, kind)(*content)
        if kind in ("Decimal", "Fraction"):
            return {"Decimal": Decimal, "Fraction": Fraction}[kind](content)
        return self._kept[content] if kind == "yours" else Kept(content)


class MessagePipe:
    """A pipe in each direction; a message is a line of JSON."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink

    def send(self, message: Any) -> None:
        """Send one message."""
        self._sink.write(json.dumps(message).encode() + b"\n")
        self._sink.flush()

    def receive(self) -> Any:
        """The next message; EOFError where the other end has gone or sends too much."""
        line = self._source.readline(MAX_MESSAGE)
        if not line.endswith(b"\n"):
            raise EOFError("the other process has ended or sends too much")
        return json.loads(line)


# -- the two roles ---------------------------------------------------------------------------------


def run_answer(line: MessagePipe) -> None:
    """Run the answer's code, then answer calls of what it defines, until the judge has gone."""
    module = ModuleType("answer")  # not __main__: what an answer does as a program is not wanted
    sys.modules["answer"] = module
    codec = Codec()
    try:
        for source in line.receive():
            exec(compile(source, "answer", "exec"), module.__dict__)
        line.send({"value": None})
        while True:
            name, arguments, named = codec.decode(line.receive())
            try:
                value = codec.encode(getattr(module, name)(*arguments, **named))
            except Exception as error:
                line.send({"error": type(error).__name__, "message": str(error)[:200]})
            else:
                line.send({"value": value})
    finally:
        os._exit(0)  # whatever the answer left to be run at the end is not run


def run_judge(line: MessagePipe, task: Mapping[str, Any]) -> None:
    """Run the tests against the answer in the other process; any exception is a failure."""
    line.send(task["code"])
    _result(line.receive(), Codec())
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(task["setup"], "setup", "exec"), namespace)
    tests = ast.parse(task["tests"])
    codec = Codec()
    names = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    known = namespace.keys() | vars(builtins).keys()
    for name in (names - known) | set(task["names"]):
        namespace[name] = _remote(name, line, codec)
    exec(compile(tests, "tests", "exec"), namespace)


def _remote(name: str, line: MessagePipe, codec: Codec) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        line.send(codec.encode((name, arguments, named)))
        return _result(line.receive(), codec)

    return call


def _result(reply: Mapping[str, Any], codec: Codec) -> Any:
    if "value" in reply:
        return codec.decode(reply["value"])
    kind = getattr(builtins, str(reply["error"]), RuntimeError)
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    raise (kind if is_error else RuntimeError)(str(reply["message"]))


def main() -> None:
    """The process; its role, limits and pipes are its arguments."""
    role, cpu_s, memory_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    private = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what code prints goes nowhere, what it asks has no answer
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    sys.set_int_max_str_digits(0)
    if role == "answer":
        confine(cpu_s, memory_bytes)
        run_answer(MessagePipe(*private))
    source, sink = (int(number) for number in sys.argv[4:6])
    line = MessagePipe(os.fdopen(source, "rb"), os.fdopen(sink, "wb"))
    task = json.loads(private[0].read())
    confine(cpu_s, memory_bytes)
    verdict = b"failed"
    try:
        run_judge(line, task)
        verdict = b"passed"
    finally:
        private[1].write(verdict)
        private[1].flush()
        os._exit(0)


if __name__ == "__main__":
    main()
