"""The model that a command's flags name: loaded, described, and refused where it cannot talk."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from flashdraft.cli.arguments import cache_options, weight_options
from flashdraft.errors import RequestError, printable
from flashdraft.llm import LLM
from flashdraft.models.sources import default_drafter
from flashdraft.status_line import STATUS


def load_model(arguments: argparse.Namespace, max_batch: int = 1) -> LLM:
    """The model that the flags name; most commands ask it one thing at a time."""
    with STATUS.during(f"Loading {printable(arguments.model)} …"):
        return LLM(
            arguments.model,
            draft=None if arguments.draft == "none" else arguments.draft,
            verify=arguments.verify,
            tree=arguments.tree,
            device=arguments.device,
            dtype=arguments.dtype,
            max_context=arguments.max_context,
            max_batch=max_batch,
            vision=not arguments.no_vision,
            mmproj=arguments.mmproj,
            lora=arguments.lora,
            **weight_options(arguments)._asdict(),
            **asdict(cache_options(arguments)),
        )


def describe_model(llm: LLM) -> str:
    """What answers: the model, the kernels that were chosen, and who drafts."""
    drafting = "plain decoding"
    if llm.drafter_name is not None:
        is_included = llm.drafter_name == default_drafter(llm.model)
        is_included &= Path(llm.drafter_name).is_absolute()
        drafting = f"drafted by {'its included drafter' if is_included else llm.drafter_name}"
    elif llm.engine.config.ngram:
        drafting = "drafted by n-gram lookup"
    return f"{llm.model} · {llm.kernels.name} on {llm.kernels.device} · {drafting}"


def require_template(llm: LLM) -> None:
    """Refuse a model that cannot answer in turns, with what can be done instead."""
    if llm.tokenizer is None:
        raise RequestError(
            f"{llm.model} has no tokenizer; the command line needs one. LLM.generate in Python "
            "takes token ids."
        )
    if llm.tokenizer.chat_template is None:
        raise RequestError(
            f"{llm.model} has no chat template; `flashdraft generate --raw` continues a prompt as "
            "it is."
        )
