"""What may be typed after `flashdraft completion`."""

from __future__ import annotations

from flashdraft.cli.completion import SHELLS
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `completion`."""
    parser.description = (
        "Print a script by which a shell completes commands, flags, models and files. In ~/.bashrc "
        'or ~/.zshrc: eval "$(flashdraft completion bash)", or zsh; for fish write it to '
        "~/.config/fish/completions/flashdraft.fish. Print it anew after an update."
    )
    parser.add_argument(
        "shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}"
    )
    parser.set_defaults(root=parser.root)
