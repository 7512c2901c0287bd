"""The commands that are composed, flag by flag, and what is refused before anything is started.

SGLANG_FLAGS are those of SGLang 0.5.23's ServerArgs that we use.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashdraft
from flashdraft.bench.plan.pairs import DRAFTERS, TARGETS
from flashdraft.errors import CapacityError, CheckpointError, ModelNotFoundError, RequestError
from flashdraft.external import sglang, vllm
from flashdraft.external.command import EngineCommand, EngineSettings, Nodes
from flashdraft.external.memory import batched_tokens
from flashdraft.external.pairs import EnginePair, export_target, exported_folder, read_pair
from flashdraft.external.versions import SGLANG, VLLM, Gpu, Installation
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import make_tiny_checkpoint

SGLANG_FLAGS = {
    "--model-path", "--host", "--port", "--served-model-name", "--dtype", "--context-length",
    "--max-running-requests", "--attention-backend", "--api-key", "--enable-metrics",
    "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-draft-tokens",
    "--speculative-draft-attention-backend", "--tp-size", "--nnodes", "--node-rank",
    "--dist-init-addr", "--enable-multimodal",
}  # fmt: skip
DENSE, EXPERTS = "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"
H200 = Gpu("H200", int(139e9), int(141e9), (9, 0))
ROOT = shlex.quote(str(Path(flashdraft.__file__).parents[1]))  # what it is to be installed from
PLAIN = EngineSettings(host="127.0.0.1", port=8000, served_names=("name",))


def engine(kind: Any = VLLM, gpus: tuple[Gpu, ...] = (H200,), **values: Any) -> Installation:
    platform = "cuda" if gpus else "cpu"
    values = {"version": kind.known, "platform": platform, "has_plugin": True, **values}
    return Installation(kind, Path("venv/bin/python"), gpus=gpus, **values)


def pair(model: str = DENSE, draft: str = "auto", gb: float | None = 65) -> EnginePair:
    found = read_pair(model, draft, TARGETS, DRAFTERS)
    return dataclasses.replace(found, weight_bytes=None if gb is None else gb * 1e9)


def settings(**values: Any) -> EngineSettings:
    return dataclasses.replace(PLAIN, **values)


def flags(command: EngineCommand) -> dict[str, str]:
    """Each flag with the word after it."""
    words = command.arguments
    return {
        word: words[at + 1] if at + 1 < len(words) else ""
        for at, word in enumerate(words)
        if word.startswith("--")
    }


def drafting(command: EngineCommand) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(flags(command)["--speculative-config"])
    return found


def test_pictures_are_shown_and_fetched_from_nowhere_unless_a_host_is_named() -> None:
    """Left to itself vLLM fetches what any client names."""
    found = flags(vllm.compose(pair(), PLAIN, engine(), False))
    assert found["--allowed-media-domains"] == "none.invalid"
    hosts = vllm.compose(
        pair(), settings(media_domains=("a.example", "b.example")), engine(), False
    )
    place = hosts.arguments.index("--allowed-media-domains")
    assert hosts.arguments[place + 1 : place + 3] == ("a.example", "b.example")
    assert hosts.environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    text = flags(vllm.compose(pair(), settings(takes_pictures=False), engine(), False))
    assert "--language-model-only" in text and "--allowed-media-domains" not in text
    blind = flags(vllm.compose(pair("Qwen/Qwen3-8B"), PLAIN, engine(), False))
    assert "--language-model-only" not in blind and "--allowed-media-domains" not in blind
    on_sglang = sglang.compose(pair(), PLAIN, engine(SGLANG), False)
    assert "--enable-multimodal" in on_sglang.arguments


def test_vllm_serves_gemma_4_as_its_drafters_makers_advise() -> None:
    command = vllm.compose(pair(), PLAIN, engine(), False)
    assert command.arguments[:5] == (
        "venv/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", DENSE,
    )  # fmt: skip
    found = flags(command)
    assert found["--attention-backend"] == "TRITON_ATTN"
    assert found["--max-num-batched-tokens"] == "32768"
    assert "--enable-prefix-caching" in found
    assert drafting(command) == {
        "method": "dflash",
        "model": "z-lab/gemma-4-31B-it-DFlash",
        "num_speculative_tokens": 15,
        "attention_backend": "FLASH_ATTN",
    }
    assert command.notes == ()


def test_vllm_chooses_the_attention_of_other_targets_itself() -> None:
    command = vllm.compose(pair("Qwen/Qwen3-8B", gb=18), PLAIN, engine(), False)
    assert "--attention-backend" not in flags(command)
    assert drafting(command)["attention_backend"] == "FLASH_ATTN"


def test_vllm_on_a_cpu_gets_no_gpu_flags() -> None:
    command = vllm.compose(pair("smollm2-135m"), PLAIN, engine(gpus=()), False)
    found = flags(command)
    assert {"--max-num-batched-tokens", "--attention-backend"}.isdisjoint(found)
    assert found["--dtype"] == "float32"
    assert "--enforce-eager" in found
    assert drafting(command).keys() == {"method", "model", "num_speculative_tokens"}


def test_vllm_on_a_cpu_refuses_a_mixed_drafter() -> None:
    with pytest.raises(RequestError, match="mixes sliding and full"):
        vllm.compose(pair(), PLAIN, engine(gpus=()), False)


def test_vllm_takes_every_setting() -> None:
    wish = settings(
        served_names=("a", "b"), api_key="key", dtype="float16", verify=7, max_context=4096,
        max_batch=8, cache_gb=2.5, device="cuda:3", extra=("--seed", "1"),
    )  # fmt: skip
    command = vllm.compose(pair(), wish, engine(), False)
    found, words = flags(command), command.arguments
    assert words[words.index("--served-model-name") + 2] == "b"
    assert (found["--dtype"], found["--max-model-len"]) == ("float16", "4096")
    assert (found["--max-num-seqs"], found["--kv-cache-memory-bytes"]) == ("8", "2500000000")
    assert drafting(command)["num_speculative_tokens"] == 7
    assert command.environment == {"VLLM_API_KEY": "key", "CUDA_VISIBLE_DEVICES": "3"}
    assert "key" not in words
    assert words[-2:] == ("--seed", "1")


@pytest.mark.parametrize("compose", [vllm.compose, sglang.compose])
def test_verify_has_the_blocks_limits(compose: Any) -> None:
    kind = VLLM if compose is vllm.compose else SGLANG
    with pytest.raises(RequestError, match="from 0 to 15"):
        compose(pair(), settings(verify=16), engine(kind), False)
    plain = compose(pair(), settings(verify=0), engine(kind), False)
    assert not any("speculative" in word for word in plain.arguments)


def test_vllm_over_gpus_and_nodes() -> None:
    two = flags(vllm.compose(pair(), settings(tensor_parallel=2), engine(gpus=(H200, H200)), False))
    assert two["--tensor-parallel-size"] == "2"
    ray = vllm.compose(
        pair(), settings(tensor_parallel=16, ray_address="10.0.0.1:6379"), engine(), False
    )
    assert flags(ray)["--distributed-executor-backend"] == "ray"
    assert ray.environment["RAY_ADDRESS"] == "10.0.0.1:6379"
    for rank in (0, 1):
        nodes = Nodes(2, rank, "10.0.0.1:5000")
        found = flags(
            vllm.compose(pair(), settings(tensor_parallel=2, nodes=nodes), engine(), False)
        )
        assert (found["--nnodes"], found["--node-rank"]) == ("2", str(rank))
        assert (found["--master-addr"], found["--master-port"]) == ("10.0.0.1", "5000")
        assert ("--headless" in found) == (rank > 0)


def test_a_drafter_with_too_few_heads_is_not_split() -> None:
    gpus, whole = (H200,) * 4, pair()
    assert whole.drafter_config is not None
    odd = dataclasses.replace(whole.drafter_config, num_heads=6, num_kv_heads=2)
    small = dataclasses.replace(whole, drafter_config=odd)
    command = vllm.compose(small, settings(tensor_parallel=4), engine(gpus=gpus), False)
    assert drafting(command)["draft_tensor_parallel_size"] == 1
    command = vllm.compose(whole, settings(tensor_parallel=4), engine(gpus=gpus), False)
    assert "draft_tensor_parallel_size" not in drafting(command)


@pytest.mark.parametrize(("kind", "compose"), [(VLLM, vllm.compose), (SGLANG, sglang.compose)])
def test_the_targets_heads_must_be_shared_out(kind: Any, compose: Any) -> None:
    with pytest.raises(RequestError, match="the target has 32 attention heads"):
        compose(pair(), settings(tensor_parallel=3), engine(kind, (H200,) * 3), False)


def test_running_answers_may_end_where_vllm_can_wait() -> None:
    assert flags(vllm.compose(pair(), PLAIN, engine(), False))["--shutdown-timeout"] == "30"
    older = vllm.compose(pair(), PLAIN, engine(version="0.26.0"), False)
    assert "--shutdown-timeout" not in flags(older)


def test_without_the_plugin_it_is_said() -> None:
    (note,) = vllm.compose(pair(), PLAIN, engine(has_plugin=False), False).notes
    assert "does not scale a Gemma 4 drafter's embeddings" in note
    assert note.endswith(f"venv/bin/python -m pip install --no-deps {ROOT}")
    other = vllm.compose(pair("Qwen/Qwen3-8B", gb=18), PLAIN, engine(has_plugin=False), False)
    assert other.notes == ()


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0"])
def test_where_the_plugin_stays_out_it_is_said(version: str) -> None:
    (note,) = vllm.compose(pair(), PLAIN, engine(version=version), False).notes
    assert "embeddings" in note and "mends that in 0.28 to 0.32" in note
    assert note.endswith('venv/bin/python -m pip install "vllm==0.32.0"')
    on_cpu = engine(version=version, gpus=(), has_plugin=False)
    (note,) = vllm.compose(pair("smollm2-135m"), PLAIN, on_cpu, False).notes
    assert "CPU sampler" in note and "in 0.31 to 0.32" in note
    assert f' "vllm==0.32.0" && venv/bin/python -m pip install --no-deps {ROOT}' in note
    assert "\n" not in note


@pytest.mark.parametrize("has_plugin", [True, False])  # of this Python, where no vLLM is
def test_a_rehearsal_for_another_machine_names_the_plugin(has_plugin: bool) -> None:
    absent = engine(version=None, gpus=(), has_plugin=has_plugin)
    (note,) = vllm.compose(pair(), PLAIN, absent, True).notes
    assert "does not scale a Gemma 4 drafter's embeddings" in note
    assert "flashdraft's plugin mends that in 0.28 to 0.32: beside that vLLM, pip install" in note
    assert "venv/bin/python" not in note and "vllm==" not in note
    (note,) = vllm.compose(pair("smollm2-135m"), settings(device="cpu"), absent, True).notes
    assert "CPU sampler" in note and "in 0.31 to 0.32: beside that vLLM, pip install" in note
    assert vllm.compose(pair("Qwen/Qwen3-8B", gb=18), PLAIN, absent, True).notes == ()
    assert vllm.compose(pair(draft="none"), PLAIN, absent, True).notes == ()


def test_without_a_source_the_remedy_says_what_to_look_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "find_source", lambda package: None)
    (note,) = vllm.compose(pair(), PLAIN, engine(has_plugin=False), False).notes
    assert note.endswith("pip install --no-deps PATH (PATH is flashdraft's checkout or wheel)")


def test_the_plugin_does_not_mend_every_cpu_sampler_that_it_scales_for() -> None:
    (note,) = vllm.compose(
        pair("smollm2-135m"), PLAIN, engine(version="0.30.0", gpus=()), False
    ).notes
    assert "CPU sampler" in note
    assert vllm.compose(pair(), PLAIN, engine(version="0.28.2"), False).notes == ()


def test_an_old_gpu_has_no_flash_attention() -> None:
    turing = Gpu("T4", int(150e9), int(160e9), (7, 5))
    command = vllm.compose(pair(), PLAIN, engine(gpus=(turing,)), False)
    assert "attention_backend" not in drafting(command)
    assert any("no FlashAttention" in note for note in command.notes)


def test_memory_is_asked_before_hours_of_loading() -> None:
    small = Gpu("H100", int(79e9), int(80e9), (9, 0))
    too_big = pair(gb=90)
    with pytest.raises(CapacityError, match=r"92 GB .* H100 has 79 GB free .*--tensor-parallel 2"):
        vllm.compose(too_big, PLAIN, engine(gpus=(small,)), False)
    with pytest.raises(CapacityError, match="4 GPUs are wanted on this machine and there are 2"):
        vllm.compose(too_big, settings(tensor_parallel=4), engine(gpus=(small, small)), False)
    busy = Gpu("H200", int(20e9), int(141e9), (9, 0))
    with pytest.raises(CapacityError, match="end what else runs on it"):
        sglang.compose(pair(), PLAIN, engine(SGLANG, (busy,)), False)
    # the user's own flag may make it fit, and a rehearsal may be for another machine
    forced = vllm.compose(too_big, settings(extra=("--q", "fp8")), engine(gpus=(small,)), False)
    assert "92 GB" in forced.notes[0]
    assert vllm.compose(too_big, PLAIN, engine(gpus=(small,)), True).notes == forced.notes


@pytest.mark.parametrize(("total_gb", "tokens"), [(141, 32768), (96, 16384), (80, 4096)])
def test_less_memory_means_shorter_prefill_steps(total_gb: float, tokens: int) -> None:
    card = Gpu("card", int(total_gb * 1e9), int(total_gb * 1e9), (9, 0))
    assert batched_tokens(pair(gb=65), [card], 1) == tokens


def test_sglang_serves_gemma_4_as_its_own_tests_do() -> None:
    command = sglang.compose(pair(EXPERTS, gb=55), PLAIN, engine(SGLANG), False)
    assert command.arguments[:5] == (
        "venv/bin/python", "-m", "sglang.launch_server", "--model-path", EXPERTS,
    )  # fmt: skip
    found = flags(command)
    assert found["--speculative-algorithm"] == "DFLASH"
    assert found["--speculative-draft-model-path"] == "z-lab/gemma-4-26B-A4B-it-DFlash"
    assert found["--speculative-num-draft-tokens"] == "16"  # the block, anchor included
    assert found["--attention-backend"] == "triton"
    assert found["--speculative-draft-attention-backend"] == "flashinfer"


def test_sglang_gets_only_flags_it_has() -> None:
    wish = settings(
        api_key="key", dtype="bfloat16", verify=7, max_context=4096, max_batch=8,
        tensor_parallel=4, nodes=Nodes(2, 1, "10.0.0.1:5000"), device="cuda",
    )  # fmt: skip
    command = sglang.compose(pair(), wish, engine(SGLANG, (H200, H200)), False)
    assert flags(command).keys() == SGLANG_FLAGS
    found = flags(command)
    assert (found["--tp-size"], found["--nnodes"], found["--node-rank"]) == ("4", "2", "1")
    assert found["--dist-init-addr"] == "10.0.0.1:5000"
    assert found["--speculative-num-draft-tokens"] == "8"


def test_sglangs_own_parser_knows_the_flags() -> None:
    """Where SGLang is installed; elsewhere the list above stands for it."""
    program = "import argparse; from sglang.srt.server_args import ServerArgs\n"
    program += "p = argparse.ArgumentParser(); ServerArgs.add_cli_args(p); print(p.format_help())"
    pytest.importorskip("sglang", reason="SGLang is not installed beside these tests")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.replace(",", " ").split()) >= SGLANG_FLAGS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "cpu"}, "on a GPU only"),
        ({"ray_address": "auto"}, "--ray-address is for vLLM"),
        ({"cache_gb": 4.0}, "--mem-fraction-static"),
        ({"served_names": ("a", "b")}, "SGLang has one name"),
    ],
)
def test_sglang_refuses_what_it_has_not(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sglang.compose(pair(), settings(**values), engine(SGLANG), False)


def test_sglang_without_a_gpu_is_refused_unless_rehearsed() -> None:
    with pytest.raises(CapacityError, match="sees none"):
        sglang.compose(pair(), PLAIN, engine(SGLANG, ()), False)
    assert sglang.compose(pair(), PLAIN, engine(SGLANG, ()), True).arguments


def test_pairs_are_read_from_folders_too(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "target", "gemma4")
    found = read_pair(str(folder), "auto", TARGETS, DRAFTERS)
    assert (found.drafter, found.is_gemma4, found.is_exported) == (None, True, False)
    assert found.weight_bytes == (folder / "model.safetensors").stat().st_size
    with pytest.raises(CheckpointError, match="does not fit the target"):
        read_pair(str(folder), "z-lab/gemma-4-31B-it-DFlash", TARGETS, DRAFTERS)
    with pytest.raises(RequestError, match="native engine's lookup"):
        read_pair(str(folder), "ngram", TARGETS, DRAFTERS)


def test_a_target_that_only_the_engine_reads_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma4", "quantization_config": {"quant_method": "awq"}})
    )
    found = read_pair(str(tmp_path), "z-lab/gemma-4-31B-it-DFlash", TARGETS, DRAFTERS)
    assert (found.target, found.is_gemma4) == (None, True)
    assert drafting(vllm.compose(found, PLAIN, engine(), False))["num_speculative_tokens"] == 15


def test_a_name_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(ModelNotFoundError, match="config.json cannot be fetched .*no route"):
        read_pair("some/model", "auto", TARGETS, DRAFTERS)


@pytest.mark.weights
def test_the_default_target_becomes_a_folder_that_engines_read(tmp_path: Path) -> None:
    export_target("smollm2-135m", tmp_path)
    ours, theirs = open_checkpoint(resolve_source("smollm2-135m").path), open_checkpoint(tmp_path)
    assert set(theirs.source.names()) == set(ours.source.names())
    name = "model.layers.3.mlp.up_proj.weight"
    assert theirs.source.read(name).equal(ours.source.read(name).float())
    assert theirs.raw_config["architectures"] == ["LlamaForCausalLM"]
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer is not None and tokenizer.chat_template
    written = (tmp_path / "model.safetensors").stat().st_mtime_ns
    export_target("smollm2-135m", tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == written  # it was there


def test_exported_targets_live_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path))
    folder = exported_folder("some/where/Model.Q4_1.gguf")
    assert folder == tmp_path / "models" / "exported" / "Model.Q4_1-float32"
