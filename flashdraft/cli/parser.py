"""The command line in words: what argparse refuses, and what the library calls a flag.

argparse decides what is wrong; its terse answers become a line with the value, what may stand there
and what was probably meant, as it is typed. What the library says of an argument of `LLM` or of a
settings field is said of the flag that was typed. No command is known here; a command's flags, and
what runs it, are loaded when they are first needed.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from flashdraft.errors import CheckpointError, FlashdraftError, RequestError, did_you_mean
from flashdraft.status_line import STATUS

EXIT_USAGE = 2
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}
_VERBS = "is|holds|has|needs|was"


class _Help(argparse.HelpFormatter):
    """Makes room for the longest command, whose own indent argparse forgets."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        for command in self._iter_indented_subactions(action):
            width = len(self._format_action_invocation(command)) + self._current_indent
            self._action_max_length = max(self._action_max_length, width)


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are one line each. It leaves its flags in `flags`."""

    root: Parser | None = None  # whose commands they are
    commands: Mapping[str, Parser] = {}  # all there are, to say which of them has an option
    is_slow = False  # so much is loaded for it that a terminal is told at once
    takes_rest = False  # what follows `--` is set aside in `extra`, whatever it looks like
    declare: Callable[[Parser], None] | None = None  # adds the flags, once they are asked for
    check: Callable[[argparse.Namespace], None] | None = None  # of what was typed, as a whole
    typed: Sequence[str] | None = None  # what is being parsed

    def __init__(self, *arguments: Any, **named: Any) -> None:
        ours = {"allow_abbrev": False, "exit_on_error": False, "formatter_class": _Help}
        super().__init__(*arguments, **{**named, **ours})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all of it: a command knows by itself what it does not take."""
        self.typed = words = list(sys.argv[1:] if args is None else args)
        self._complete()
        cut = words.index("--") if self.takes_rest and "--" in words else len(words)
        try:
            found, unknown = super().parse_known_args(words[:cut], namespace)
        except argparse.ArgumentError as error:
            self.error(self._describe(error, words))
        if unknown:
            self.error(self._describe_unknown(unknown[0]))
        if self.takes_rest:
            found.extra = words[cut + 1 :]
        if not hasattr(found, "flags"):  # those of a command within this one go first
            found.flags = self._flags()
        if self.check is not None:
            self.check(found)
        return found, unknown

    def format_help(self) -> str:
        """The help, with all flags."""
        self._complete()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """End with what is wrong and where help is."""
        missing = re.fullmatch("the following arguments are required: (.*)", message)
        one = re.fullmatch("one of the arguments (.*) is required", message)
        if missing or one:
            message = self._describe_missing(
                missing[1] if missing else " or ".join(one[1].split()) if one else ""
            )
        message += "" if message.endswith(("?", ".")) else "."
        STATUS.clear()
        print(f"flashdraft: error: {message} See {self.prog} --help.", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def _describe(self, error: argparse.ArgumentError, words: list[str]) -> str:
        flag, message = (error.argument_name or "").split("/")[-1], error.message
        action = next((one for one in self._actions if flag in _names(one)), None)
        if message.startswith("not allowed with argument "):
            return f"{flag} and {message.split()[-1].split('/')[-1]} do not go together; drop one"
        if action is None:
            return f"{flag}: {message}"
        if message.startswith("ignored explicit argument"):  # -hf is no -h with something behind
            for word in words:
                if word[:2] in action.option_strings and not word.startswith("--") and word[2:]:
                    return self._describe_unknown(word)
        if message.startswith("expected"):
            shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            return f"{flag} needs a value: {flag} {shown}"
        value = re.search(r"^invalid [\w ]*(?:choice|value): '(.*?)'(?: \(|$)", message, re.DOTALL)
        if value is None:
            return f"{flag}: {message}"
        if action.choices is None:
            return f"{flag} is {value[1]!r}; it must be {_KINDS.get(action.type, 'something else')}"
        known = list(map(str, action.choices))
        listed, meant = ", ".join(known), did_you_mean(value[1], known)
        if action.nargs == argparse.PARSER:
            before = words[: words.index(value[1])] if value[1] in words else []
            if before and before[-1].startswith("--") and before[-1] not in self._long_options():
                return self._describe_unknown(before[-1])  # whose value looks like a command
            return f"There is no command {value[1]!r}.{meant} Known: {listed}"
        return f"{flag} is {value[1]!r}; it must be one of {listed}.{meant}"

    def _describe_missing(self, names: str) -> str:
        known = self._option_string_actions
        for word in self.typed or ():  # a mistyped flag may be why
            if re.match("--?[a-zA-Z]", word) and word.split("=")[0] not in known:
                return self._describe_unknown(word)
        return f"What is missing: {names}. It reads: {self.usage_line()}"

    def usage_line(self) -> str:
        """What has to be typed, and what may be but for options."""
        self._complete()
        words = [self.prog]
        for action in self._actions:
            name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if action.option_strings and action.required:
                words.append(f"{action.option_strings[-1]} {name}")
            elif not action.option_strings and action.help != argparse.SUPPRESS:
                is_needed = action.required and action.nargs not in ("?", "*")
                words.append(name if is_needed else f"[{name}]")
        return " ".join(words)

    def _describe_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            hint = "; a model is named by --model" if "--model" in self._long_options() else ""
            if any(action.dest == "prompt" for action in self._actions):
                hint = f"; put a prompt of several words in quotes{hint}"
            return f"{self.prog} does not take {word!r}{hint}"
        flag = word.split("=")[0]
        for action in self._actions:  # what another command has a flag for
            name = action.metavar if isinstance(action.metavar, str) else action.dest
            if not action.option_strings and did_you_mean(flag.lstrip("-"), [name]):
                return f"{self.prog} has no option {flag}; name {name} without one"
        having = [one for one in self.commands.values() if flag in one._long_options()]
        others = list(dict.fromkeys(one.prog.split()[-1] for one in having))  # a name each
        if others:
            return f"{self.prog} has no option {flag}; it is one of {', '.join(others)}"
        bare = {name.lstrip("-"): name for name in self._long_options()}
        meant = did_you_mean(flag.lstrip("-"), bare)
        for name, option in bare.items():  # each as it is typed, with what stands for its value
            meant = re.sub(rf"(?<= ){re.escape(name)}(?= or |\?)", self._as_typed(option), meant)
        return f"{self.prog} has no option {flag}.{meant}"

    def _as_typed(self, option: str) -> str:
        action = self._option_string_actions[option]
        if action.nargs == 0:
            return option
        shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        return f"{option} [{shown}]" if action.nargs == "?" else f"{option} {shown}"

    def _complete(self) -> None:
        declare, self.declare = self.declare, None
        if declare is not None:
            if self.is_slow and self.typed is not None and not {"-h", "--help"} & {*self.typed}:
                STATUS.show("Loading …")  # until `later` has loaded the rest
            declare(self)

    def _print_message(self, message: str, file: Any = None) -> None:
        STATUS.clear()
        super()._print_message(message, file)

    def _long_options(self) -> dict[str, argparse.Action]:
        self._complete()
        options = [(name, action) for action in self._actions for name in action.option_strings]
        return {name: action for name, action in options if name.startswith("--")}

    def _flags(self) -> dict[str, str]:
        """What the library calls the long options; one given several times fills a plural."""
        flags = {action.dest: name for name, action in self._long_options().items()}
        several = {
            f"{action.dest}s": name
            for name, action in self._long_options().items()
            if isinstance(action.default, list)
        }
        return {**several, **flags}


def _names(action: argparse.Action) -> tuple[str | None, ...]:
    metavar = action.metavar if isinstance(action.metavar, str) else None
    return (*action.option_strings, metavar, action.dest)


def later(module: str) -> Callable[[argparse.Namespace], int]:
    """What a command's module has as `run`; it is loaded then, with everything that it needs."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            run_command = importlib.import_module(module).run
        finally:
            STATUS.clear()
        code: int = run_command(arguments)
        return code

    return run


class OneOf:
    """The type of a flag that takes one of some words; nothing is loaded to find out."""

    def __init__(self, flag: str, known: Sequence[str], otherwise: str = "") -> None:
        """`otherwise` says what else it takes."""
        self.flag, self.known, self.otherwise = flag, known, otherwise

    def __call__(self, text: str) -> str:
        if text not in self.known:
            listed, meant = ", ".join(self.known), did_you_mean(text, self.known)
            listed += f", or {self.otherwise}" if self.otherwise else ""
            raise RequestError(f"{self.flag} is {text!r}; it must be one of {listed}.{meant}")
        return text


class _Device(OneOf):
    def __call__(self, text: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
            meant = did_you_mean(text, self.known)
            raise RequestError(f"--device is {text!r}; it must be auto, cpu or cuda.{meant}")
        return text


device = _Device("--device", ("auto", "cpu", "cuda"))  # the type of --device


def in_flags(error: FlashdraftError, flags: Mapping[str, str]) -> str:
    """An error's message with flags where it names arguments in Python's way.

    A name with an underscore is one wherever it stands by itself, `name=value` too; a plain word
    ("model", "steps") only as the subject of a sentence. What a checkpoint's files say is theirs.
    """
    message = str(error)
    if isinstance(error, CheckpointError):
        return message
    for name, flag in sorted(flags.items(), key=lambda one: -len(one[0])):
        word = rf"(?<![\w./'\"-]){re.escape(name)}"
        message = re.sub(rf"{word}='([^']*)'", rf"{flag} \1", message)
        message = re.sub(rf"{word}=True\b", flag, message)
        if "_" in name:
            message = re.sub(rf"{word}(?!\w|\.\w|[='\"-])", flag, message)
        else:
            message = re.sub(rf"(^|[.;:] ){re.escape(name)} (?={_VERBS})", rf"\1{flag} ", message)
    message = re.sub(r"(--[\w-]+ is \S+; it must be )None \('(\w+)'\) or ", r"\1\2 or ", message)
    message = re.sub(r"(--[\w-]+ is \S+; it must be )None or ", r"\1", message)
    message = re.sub(r"(--[\w-]+ is \S+; .*), or None \([^)]*\)", r"\1", message)
    return re.sub(r"(--[\w-]+ is \S+; .*), or None for ", r"\1, or left out for ", message)
