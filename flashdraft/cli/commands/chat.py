"""`flashdraft chat [MODEL] [PROMPT]`, also called `run`: a conversation, or with PROMPT one answer.

In a terminal lines are typed; from a pipe every line is a question, or with PROMPT all of it goes
before the prompt.
"""

from __future__ import annotations

import argparse

from flashdraft.cli.arguments import model_sampling, sampling_params
from flashdraft.cli.chat.conversation import Conversation
from flashdraft.cli.chat.session import Chat
from flashdraft.cli.chat.talk import Talk
from flashdraft.cli.display import Screen
from flashdraft.cli.input import is_terminal_input, read_prompt
from flashdraft.cli.model import load_model, require_template
from flashdraft.cli.pictures import picture_budget, pictures_of


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves, or answer once."""
    sampling_params(arguments)  # a wrong flag is reported before the model is loaded
    pictures = pictures_of(arguments)
    question = None
    if arguments.prompt:
        question = read_prompt(" ".join(arguments.prompt))
    llm = load_model(arguments)
    require_template(llm)
    params = sampling_params(arguments, model_sampling(llm.generation_config))
    screen = Screen.detect()
    talk = Talk(llm, params, screen, Conversation(arguments.system))
    talk.pictures, talk.picture_budget = pictures, picture_budget(arguments)
    chat = Chat(talk, screen, arguments.flags)
    if question is not None:
        talk.more_room = "--max-tokens"
        talk.ask(question)
        if talk.was_interrupted:
            raise KeyboardInterrupt
    elif is_terminal_input():
        chat.talk_in_terminal()
    else:
        chat.talk_through_pipe()
    return 0
