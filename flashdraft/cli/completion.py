"""Completion for bash, zsh and fish, written from the parser: its commands, flags and choices.

What a value may be is read off its flag: choices, words, a model, a drafter, a GPU, a file. The
names of models and GPUs are those that are known as the script is printed. Nothing that is typed is
ever run: a script holds words, and asks the shell for files.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flashdraft.bench.plan.gpus import cards_by_memory
from flashdraft.cli.parser import OneOf, Parser
from flashdraft.models.sources import known_models

_FILES = ("DIR", "FILE", "FOLDER", "PATH")  # metavars
_MODELS = ("MODEL", "TARGET")
_DRAFTERS = ("auto", "none", "ngram")  # besides names
_WORD = re.compile(r"[\w./:+@-]+")  # with nothing in it that a shell would read


class Values(NamedTuple):
    """What may stand somewhere."""

    words: tuple[str, ...] = ()
    has_files: bool = False


class CompletedFlag(NamedTuple):
    """A flag; `values` is None where it takes none."""

    names: tuple[str, ...]
    values: Values | None
    metavar: str
    text: str


class CompletedCommand(NamedTuple):
    """A command by all its names, its flags, and what stands without one."""

    names: tuple[str, ...]
    text: str
    flags: tuple[CompletedFlag, ...]
    rest: Values


def describe_commands(root: Parser) -> list[CompletedCommand]:
    """Every command; the first, with no name, is what stands before one."""
    (action,) = (one for one in root._actions if isinstance(one, argparse._SubParsersAction))
    texts = {one.dest: one.help or "" for one in action._choices_actions}
    commands = [_describe(root, (), "")]
    for parser in dict.fromkeys(action.choices.values()):
        names = tuple(name for name, one in action.choices.items() if one is parser)
        commands.append(_describe(parser, names, texts[names[0]]))
    return commands


def _describe(parser: Parser, names: tuple[str, ...], text: str) -> CompletedCommand:
    parser.usage_line()  # has the flags declared
    flags = tuple(_flag(parser, one) for one in parser._actions if one.option_strings)
    rest = [_values(one) for one in parser._actions if not one.option_strings]
    words = dict.fromkeys(word for one in rest for word in one.words)
    return CompletedCommand(
        names, text, flags, Values(tuple(words), any(one.has_files for one in rest))
    )


def _flag(parser: Parser, action: argparse.Action) -> CompletedFlag:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    values = None if action.nargs == 0 else _values(action)
    return CompletedFlag(tuple(action.option_strings), values, metavar, text)


def _values(action: argparse.Action) -> Values:
    """What may be given to a flag or stand for a positional argument."""
    metavar, models = action.metavar, known_models()
    has_files, words = action.type is Path or metavar in _FILES, list[str]()
    if action.choices is not None:
        words += map(str, action.choices)
    elif isinstance(action.type, OneOf):
        words += action.type.known
    elif action.dest == "gpu":
        words += (
            card.title.partition(" (")[0].replace(" ", "").lower() for card in cards_by_memory()
        )
    elif action.dest == "names" or metavar in _MODELS or action.dest == "model":
        words += (model.name for model in models)
        has_files = action.dest != "names"
    elif metavar == "DRAFTER":
        words += _DRAFTERS if action.dest == "draft" else ()
        names = (model.drafter for model in models if model.drafter is not None)
        words += (name for name in names if not Path(name).is_absolute())
        has_files = True
    elif isinstance(action.default, str) and not has_files:
        words.append(action.default)
    return Values(tuple(word for word in words if _WORD.fullmatch(word)), has_files)


# -- bash ------------------------------------------------------------------------------------------

_BASH = """\
# bash completion for flashdraft. To have it in every shell, in ~/.bashrc:
#   eval "$(flashdraft completion bash)"
_flashdraft() {
    local cur=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local command='' words='' files='' number
    if [[ $cur == '=' ]]; then  # bash cuts --flag=value into three words
        cur=''
    elif [[ $before == '=' ]]; then
        before=${COMP_WORDS[COMP_CWORD-2]}
    fi
    case $cur in  # as it is, without the quote or the backslashes it is typed with
        [\\'\\"]*) cur=${cur:1} ;;
        *) cur=${cur//\\\\/} ;;
    esac
    for ((number = 1; number < COMP_CWORD; number++)); do
        case ${COMP_WORDS[number]} in
            @NAMES@) command=${COMP_WORDS[number]}; break ;;
        esac
    done
    case $command:$before in
@VALUES@
        *)
            case $command:$cur in
@FLAGS@
@REST@
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ $files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$cur")
    fi
}
complete -F _flashdraft flashdraft
"""


def bash_script(commands: list[CompletedCommand]) -> str:
    """The script for bash."""
    values: dict[Values, list[str]] = {}
    for command in commands:
        for flag in command.flags:
            for name in command.names or ("",):
                if flag.values is not None:
                    patterns = (f"{name}:{option}" for option in flag.names)
                    values.setdefault(flag.values, []).extend(patterns)
    value_lines = [
        f"        {'|'.join(patterns)}) {_bash_words(found)} ;;"
        for found, patterns in values.items()
    ]
    flag_lines, rest_lines = [], []
    for command in commands:
        options = Values(tuple(name for flag in command.flags for name in flag.names))
        names = command.names or ("",)
        rest = command.rest if command.rest != Values() else options
        line = f"                {'|'.join(f'{name}:-*' for name in names)})"
        flag_lines.append(f"{line} {_bash_words(options)} ;;")
        line = f"                {'|'.join(f'{name}:*' for name in names)})"
        rest_lines.append(f"{line} {_bash_words(rest)} ;;")
    return (
        _BASH.replace("@NAMES@", "|".join(name for one in commands for name in one.names))
        .replace("@VALUES@", "\n".join(value_lines))
        .replace("@FLAGS@", "\n".join(flag_lines))
        .replace("@REST@", "\n".join(rest_lines))
    )


def _bash_words(values: Values) -> str:
    return f"words='{' '.join(values.words)}' files={'yes' if values.has_files else ''}"


# -- zsh -------------------------------------------------------------------------------------------

_ZSH = """\
#compdef flashdraft
# zsh completion for flashdraft. To have it in every shell, in ~/.zshrc after compinit:
#   eval "$(flashdraft completion zsh)"
_flashdraft() {
    local context state state_descr line
    local -a commands
    typeset -A opt_args
    _arguments -C \\
@ROOT@
        '1:command:->command' \\
        '*::argument:->arguments'
    case $state in
        command)
            commands=(
@NAMES@
            )
            _describe command commands ;;
        arguments)
            case $words[1] in
@COMMANDS@
            esac ;;
    esac
}
if [[ $funcstack[1] == _flashdraft ]]; then
    _flashdraft "$@"
else
    compdef _flashdraft flashdraft
fi
"""


def zsh_script(commands: list[CompletedCommand]) -> str:
    """The script for zsh."""
    root, *others = commands
    names = [
        " " * 16 + shlex.quote(f"{name}:{_for_zsh(command.text)}")
        for command in others
        for name in command.names
    ]
    cases = []
    for command in others:
        specs = [*_zsh_flags(command), shlex.quote(f"*:argument:{_zsh_action(command.rest)}")]
        body = " \\\n".join(" " * 20 + spec for spec in specs)
        cases.append(f"{' ' * 16}{'|'.join(command.names)})\n{' ' * 20}_arguments \\\n{body} ;;")
    return (
        _ZSH.replace("@ROOT@", "\n".join(f"        {spec} \\" for spec in _zsh_flags(root)))
        .replace("@NAMES@", "\n".join(names))
        .replace("@COMMANDS@", "\n".join(cases))
    )


def _zsh_flags(command: CompletedCommand) -> Iterator[str]:
    for flag in command.flags:
        for name in flag.names:
            text = f"[{_for_zsh(flag.text)}]"
            if flag.values is None:
                yield shlex.quote(f"{name}{text}")
            else:
                sign = "=" if name.startswith("--") else ""
                action = _zsh_action(flag.values)
                yield shlex.quote(f"{name}{sign}{text}:{_for_zsh(flag.metavar)}:{action}")


def _zsh_action(values: Values) -> str:
    words = f"({' '.join(values.words)})" if values.words else ""
    if not values.has_files:
        return words or " "
    if not words:
        return "_files"
    return f'{{ _alternative "words:name:{words}" "files:file:_files" }}'


def _for_zsh(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", _plain(text))


# -- fish ------------------------------------------------------------------------------------------


def fish_script(commands: list[CompletedCommand]) -> str:
    """The script for fish."""
    lines = [
        "# fish completion for flashdraft. To have it in every shell:",
        "#   flashdraft completion fish > ~/.config/fish/completions/flashdraft.fish",
        "complete -c flashdraft -f",
    ]
    for command in commands:
        condition = f"__fish_seen_subcommand_from {' '.join(command.names)}"
        start = f"complete -c flashdraft -n '{condition if command.names else _FISH_FIRST}'"
        for name in command.names:
            lines.append(
                f"complete -c flashdraft -n '{_FISH_FIRST}' -a {name} -d {_for_fish(command.text)}"
            )
        for flag in command.flags:
            names = " ".join(
                f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in flag.names
            )
            lines.append(f"{start} {names}{_fish_values(flag.values)} -d {_for_fish(flag.text)}")
        if command.names and command.rest != Values():
            files = " -F" if command.rest.has_files else ""
            words = f" -a '{' '.join(command.rest.words)}'" if command.rest.words else ""
            lines.append(f"{start}{files}{words}")
    return "\n".join(lines) + "\n"


_FISH_FIRST = "__fish_use_subcommand"


def _fish_values(values: Values | None) -> str:
    if values is None:
        return ""
    words = f" -a '{' '.join(values.words)}'" if values.words else ""
    return f" -r -F{words}" if values.has_files else f" -x{words}"


def _for_fish(text: str) -> str:
    return "'" + _plain(text).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _plain(text: str) -> str:
    return " ".join(text.split())


SHELLS: dict[str, Callable[[list[CompletedCommand]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
