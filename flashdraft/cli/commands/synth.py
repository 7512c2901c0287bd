"""`flashdraft synth --out FILE --count N`: prompts that the target itself writes."""

from __future__ import annotations

import argparse

from flashdraft.cli.arguments import weight_options
from flashdraft.cli.display import Screen
from flashdraft.cli.files import check_writable, write_json
from flashdraft.errors import RequestError
from flashdraft.interrupts import terminate_as_interrupt
from flashdraft.kernels.select import weights_of
from flashdraft.train.data.prompts import read_texts
from flashdraft.train.data.regenerate import load_target
from flashdraft.train.data.settings import SynthSettings
from flashdraft.train.data.synth import synthesize


def run(arguments: argparse.Namespace) -> int:
    """Write the prompts."""
    for name in ("count", "slots"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise RequestError(f"--{name} is {value}; it must be at least 1.")
    settings = SynthSettings(
        max_tokens=arguments.max_tokens,
        any_language=arguments.any_language,
        seed=arguments.seed,
    )
    check_writable(arguments.out)
    forbidden = read_texts(arguments.exclude)  # unreadable? Better now than after loading
    with terminate_as_interrupt():
        llm = load_target(
            arguments.model,
            arguments.device,
            arguments.dtype,
            weight_options(arguments),
        )
        report = synthesize(
            llm,
            arguments.out,
            arguments.count,
            settings,
            exclude=forbidden,
            num_slots=arguments.slots,
        )
    if arguments.json is not None:
        content = {
            "file": str(arguments.out),
            **weights_of(llm.kernels)._asdict(),
            "found": report.num_found,
            "kept": report.num_kept,
            "drawn": report.num_drawn,
            "dropped": dict(report.dropped),
            "tokens": report.num_tokens,
            "seconds": report.seconds,
            "tokens_per_s": report.tokens_per_s,
        }
        write_json(arguments.json, content)
    else:
        dropped = ", ".join(f"{reason} {n}" for reason, n in report.dropped.most_common())
        Screen.detect().note(
            f"{report.num_kept} prompts in {arguments.out} beside {report.num_found} that were "
            f"there · {report.num_drawn} drawn · {report.tokens_per_s:.0f} tok/s"
            + (f"\ndropped: {dropped}" if dropped else "")
        )
    return 0
