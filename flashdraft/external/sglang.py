"""SGLang's command for a pair: its flags as of 0.5.23. It composes and refuses; it starts nothing.

SGLang counts the whole block where vLLM counts draft tokens. Its radix cache is on by itself, and
the drafter's keys and values lie in the target's slots, so there is no flag for prefix caching.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashdraft.errors import CapacityError, RequestError
from flashdraft.external.command import EngineCommand, EngineSettings
from flashdraft.external.memory import fit_notes
from flashdraft.external.pairs import EnginePair
from flashdraft.external.versions import Installation

_MODULE = "sglang.launch_server"


def compose(
    pair: EnginePair, settings: EngineSettings, installation: Installation, is_rehearsal: bool
) -> EngineCommand:
    """The command; a rehearsal may be for another machine, so what this one lacks is no error."""
    _check(settings)
    pair.check_split(settings.tensor_parallel)
    notes: list[str] = []
    if installation.gpus:
        notes = fit_notes(pair, settings, installation, is_rehearsal)
    elif not is_rehearsal:
        raise CapacityError(
            f"SGLang drafts on a GPU only, and {installation.python} sees none; use --engine "
            "vllm or the native engine on a CPU."
        )
    arguments = [*_program(installation), "--model-path", pair.model]
    arguments += [*_serving_flags(pair, settings), *_drafting_flags(pair, settings)]
    arguments += [*_parallel_flags(settings), *settings.extra]
    environment = {}
    if settings.device.startswith("cuda:"):
        environment["CUDA_VISIBLE_DEVICES"] = settings.device.removeprefix("cuda:")
    return EngineCommand(tuple(arguments), environment, tuple(notes), settings.api_key)


def _check(settings: EngineSettings) -> None:
    if settings.device == "cpu":
        raise RequestError("SGLang drafts on a GPU only; on a CPU use --engine vllm or native.")
    if settings.ray_address is not None:
        raise RequestError(
            "--ray-address is for vLLM; SGLang starts once on every machine, with --nodes, "
            "--node-rank and --head."
        )
    if settings.cache_gb is not None:
        raise RequestError(
            "--cache-gb has no counterpart in SGLang, which takes a share of the GPU: pass "
            "-- --mem-fraction-static 0.8, say."
        )
    if not settings.takes_pictures:
        raise RequestError(
            "--no-vision has no counterpart in SGLang, which loads the whole checkpoint; use "
            "--engine vllm or native."
        )
    if settings.media_domains:
        raise RequestError(
            "--allow-media-domain has no counterpart in SGLang, which fetches from any host; use "
            "--engine vllm or native."
        )
    if len(settings.served_names) > 1:
        raise RequestError(
            f"--served-model-name is given {len(settings.served_names)} times; SGLang has one name."
        )


def _program(installation: Installation) -> list[str]:
    if installation.version is None:  # a rehearsal for another machine
        return ["python", "-m", _MODULE]
    return [str(installation.python), "-m", _MODULE]


def _serving_flags(pair: EnginePair, settings: EngineSettings) -> Iterator[str]:
    yield from ("--host", settings.host, "--port", str(settings.port))
    for name in settings.served_names:
        yield from ("--served-model-name", name)
    dtype = settings.dtype
    if dtype == "auto" and pair.is_exported:
        dtype = "bfloat16"  # the folder's own float32 is for exactness
    yield from ("--dtype", dtype)
    if settings.max_context is not None:
        yield from ("--context-length", str(settings.max_context))
    if settings.max_batch is not None:
        yield from ("--max-running-requests", str(settings.max_batch))
    if pair.is_gemma4:  # heads of 256 and 512 side by side
        yield from ("--attention-backend", "triton")
    if pair.sees_pictures and settings.takes_pictures:
        yield "--enable-multimodal"
    if settings.api_key is not None:
        yield from ("--api-key", settings.api_key)
    yield "--enable-metrics"  # where `flashdraft bench --url` reads accepted lengths


def _drafting_flags(pair: EnginePair, settings: EngineSettings) -> Iterator[str]:
    if pair.drafter is None or pair.drafter_config is None or settings.verify == 0:
        return
    block = pair.drafter_config.block_size
    if settings.verify is not None:
        if not 1 <= settings.verify < block:
            raise RequestError(
                f"verify is {settings.verify}; with this drafter's block it is from 0 to "
                f"{block - 1}."
            )
        block = settings.verify + 1
    yield from ("--speculative-algorithm", "DFLASH")
    yield from ("--speculative-draft-model-path", pair.drafter)
    yield from ("--speculative-num-draft-tokens", str(block))
    if pair.is_gemma4:  # what SGLang's own tests of this pair use
        yield from ("--speculative-draft-attention-backend", "flashinfer")


def _parallel_flags(settings: EngineSettings) -> Iterator[str]:
    if settings.tensor_parallel > 1:
        yield from ("--tp-size", str(settings.tensor_parallel))
    nodes = settings.nodes
    if nodes is not None:
        yield from ("--nnodes", str(nodes.count), "--node-rank", str(nodes.rank))
        yield from ("--dist-init-addr", nodes.head)
