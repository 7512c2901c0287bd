"""vLLM's command for a pair: its flags as of 0.32, and what its runners cannot do.

It composes and refuses; it starts nothing. The drafter goes in with `--speculative-config`, whose
number of draft tokens is the block less its anchor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from flashdraft.errors import CapacityError, RequestError
from flashdraft.external.command import EngineCommand, EngineSettings
from flashdraft.external.memory import batched_tokens, fit_notes
from flashdraft.external.pairs import EnginePair
from flashdraft.external.versions import VLLM, Installation, find_source
from flashdraft.external.vllm_plugin.releases import MENDED, SCALED, find_release

_MODULE = "vllm.entrypoints.cli.main"
_FLASH_ATTENTION_FROM = (8, 0)  # compute capability
_NOWHERE = "none.invalid"  # no host ever has this name
_PACKAGE = Path(__file__).parents[1]
_FROM_PATH = "--no-deps PATH (PATH is flashdraft's checkout or wheel"  # it is on no index


def compose(
    pair: EnginePair, settings: EngineSettings, installation: Installation, is_rehearsal: bool
) -> EngineCommand:
    """The command; a rehearsal may be for another machine, so what this one lacks is no error."""
    pair.check_split(settings.tensor_parallel)
    on_cpu = _runs_on_cpu(settings, installation, is_rehearsal)
    notes: list[str] = []
    if on_cpu:
        _check_cpu(pair, settings)
    elif installation.gpus and settings.ray_address is None:
        notes += fit_notes(pair, settings, installation, is_rehearsal)
    arguments = [*_program(installation), "serve", pair.model]
    arguments += [*_serving_flags(settings), *_picture_flags(pair, settings)]
    arguments += ["--dtype", _dtype(pair, settings, on_cpu), "--enable-prefix-caching"]
    version = installation.version
    if version is None or VLLM.parse(version) >= VLLM.parse(VLLM.known):
        # without it, a signal cuts running answers short; older ones may not know the flag
        arguments += ["--shutdown-timeout", str(math.ceil(settings.drain_s))]
    if on_cpu:
        # compiled code was never tried there, and takes long to make
        arguments.append("--enforce-eager")
    else:
        tokens = batched_tokens(pair, installation.gpus, settings.tensor_parallel)
        arguments += ["--max-num-batched-tokens", str(tokens)]
        if pair.is_gemma4:  # heads of 256 and 512 side by side
            arguments += ["--attention-backend", "TRITON_ATTN"]
    drafting = _speculative_config(pair, settings, installation, on_cpu)
    if drafting is not None:
        arguments += ["--speculative-config", json.dumps(drafting)]
        notes += _drafting_notes(pair, installation, on_cpu)
    arguments += [*_parallel_flags(settings), *settings.extra]
    return EngineCommand(
        tuple(arguments), _environment(settings, on_cpu), tuple(notes), settings.api_key
    )


def _runs_on_cpu(settings: EngineSettings, installation: Installation, is_rehearsal: bool) -> bool:
    if settings.device == "cpu":
        return True
    has_gpu = bool(installation.gpus) or settings.ray_address is not None
    if settings.device != "auto" and not has_gpu and not is_rehearsal:
        raise CapacityError(
            f"--device is {settings.device} and {installation.python} sees no GPU; is its torch a "
            "CUDA build, and does nvidia-smi show one?"
        )
    is_installed = installation.version is not None
    return settings.device == "auto" and is_installed and not has_gpu


def _check_cpu(pair: EnginePair, settings: EngineSettings) -> None:
    if pair.is_mixed:
        raise RequestError(
            "The drafter mixes sliding and full attention layers, which only vLLM's GPU runner "
            "(V2, on Triton) can serve; on a CPU use another drafter, --draft none, or --engine "
            "native."
        )
    if settings.tensor_parallel > 1:
        raise RequestError(
            f"--tensor-parallel {settings.tensor_parallel} is for GPUs; vLLM would run on the CPU."
        )


def _program(installation: Installation) -> list[str]:
    program = installation.program
    if program is not None:
        return [str(program)]
    if installation.version is None:  # a rehearsal for another machine
        return ["vllm"]
    return [str(installation.python), "-m", _MODULE]


def _serving_flags(settings: EngineSettings) -> Iterator[str]:
    yield from ("--host", settings.host, "--port", str(settings.port))
    if settings.served_names:
        yield from ("--served-model-name", *settings.served_names)
    if settings.max_context is not None:
        yield from ("--max-model-len", str(settings.max_context))
    if settings.max_batch is not None:
        yield from ("--max-num-seqs", str(settings.max_batch))
    if settings.cache_gb is not None and settings.device != "cpu":
        yield from ("--kv-cache-memory-bytes", str(int(settings.cache_gb * 1e9)))


def _picture_flags(pair: EnginePair, settings: EngineSettings) -> Iterator[str]:
    """Left to itself vLLM fetches from any host, this machine's network included."""
    if not pair.sees_pictures:
        return
    if settings.takes_pictures:
        yield from ("--allowed-media-domains", *(settings.media_domains or (_NOWHERE,)))
    else:
        yield "--language-model-only"


def _parallel_flags(settings: EngineSettings) -> Iterator[str]:
    if settings.tensor_parallel > 1:
        yield from ("--tensor-parallel-size", str(settings.tensor_parallel))
    if settings.ray_address is not None:
        yield from ("--distributed-executor-backend", "ray")
    nodes = settings.nodes
    if nodes is not None:
        yield from ("--nnodes", str(nodes.count), "--node-rank", str(nodes.rank))
        yield from ("--master-addr", nodes.head_host, "--master-port", nodes.head_port)
        if nodes.rank > 0:
            yield "--headless"


def _speculative_config(
    pair: EnginePair, settings: EngineSettings, installation: Installation, on_cpu: bool
) -> dict[str, Any] | None:
    if pair.drafter is None or pair.drafter_config is None or settings.verify == 0:
        return None
    most = pair.drafter_config.num_slots
    count = most if settings.verify is None else settings.verify
    if not 1 <= count <= most:
        raise RequestError(f"verify is {count}; with this drafter's block it is from 0 to {most}.")
    config: dict[str, Any] = {
        "method": "dflash",
        "model": pair.drafter,
        "num_speculative_tokens": count,
    }
    if not on_cpu and _has_flash_attention(installation):
        config["attention_backend"] = "FLASH_ATTN"
    parts = settings.tensor_parallel
    if parts > 1 and (pair.drafter_config.num_heads % parts):
        config["draft_tensor_parallel_size"] = 1  # it has too few heads to share out
    return config


def _has_flash_attention(installation: Installation) -> bool:
    """Unknown GPUs count as recent ones: FlashAttention is what drafters are recommended with."""
    if installation.platform == "rocm":
        return False
    return all(gpu.capability >= _FLASH_ATTENTION_FROM for gpu in installation.gpus)


def _drafting_notes(pair: EnginePair, installation: Installation, on_cpu: bool) -> Iterator[str]:
    if not on_cpu and not _has_flash_attention(installation):
        yield "These GPUs have no FlashAttention; vLLM chooses the drafter's attention itself."
    release = find_release(installation.version or "")
    if pair.is_gemma4 and not (installation.has_plugin and release.scales_drafters):
        yield (
            "vLLM does not scale a Gemma 4 drafter's embeddings by itself, so that fewer draft "
            f"tokens are accepted. {_remedy(installation, SCALED)}"
        )
    elif on_cpu and not (installation.has_plugin and release.mends_cpu):
        yield (
            "vLLM's CPU sampler is broken beside a drafter for temperatures above 0 and for "
            f"top_k. {_remedy(installation, MENDED)}"
        )


def _remedy(installation: Installation, releases: Sequence[str]) -> str:
    """How to get the plugin to work, where it is missing or does not know the release."""
    known = f"flashdraft's plugin mends that in {releases[0]} to {releases[-1]}"
    source = find_source(_PACKAGE)
    if installation.version is None:  # a rehearsal: which plugins are beside that vLLM is not known
        here = "" if source is None else f", here {source}"
        return f"{known}: beside that vLLM, pip install {_FROM_PATH}{here})"
    install = f"{installation.python} -m pip install"
    commands = []
    if not any(installation.version.startswith(f"{name}.") for name in releases):
        commands.append(f'{install} "{VLLM.packages[0]}=={VLLM.known}"')
    if not installation.has_plugin:
        path = f"{_FROM_PATH})" if source is None else f"--no-deps {quote(str(source))}"
        commands.append(f"{install} {path}")
    return f"{known}: {' && '.join(commands)}"


def _dtype(pair: EnginePair, settings: EngineSettings, on_cpu: bool) -> str:
    if settings.dtype != "auto" or not pair.is_exported:
        return settings.dtype
    return "float32" if on_cpu else "bfloat16"  # the folder's own float32 is for exactness


def _environment(settings: EngineSettings, on_cpu: bool) -> dict[str, str]:
    environment = {}
    if settings.api_key is not None:  # a flag would show in the list of processes
        environment["VLLM_API_KEY"] = settings.api_key
    if settings.media_domains:  # an allowed host may send on to one that is not
        environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
    if settings.ray_address is not None:
        environment["RAY_ADDRESS"] = settings.ray_address
    if settings.device.startswith("cuda:"):
        environment["CUDA_VISIBLE_DEVICES"] = settings.device.removeprefix("cuda:")
    if on_cpu and settings.cache_gb is not None:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(settings.cache_gb))
    return environment
