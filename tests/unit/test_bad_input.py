"""Bad input of every kind, through the Python API: a typed error with value, limit and remedy.

Whatever is refused, the same LLM answers the next good request as before.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors as hub_errors

from flashdraft import LLM, SamplingParams
from flashdraft.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    FlashdraftError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.loading import save_drafter
from flashdraft.models.drafter.model import Drafter
from tests.tiny import VOCAB_SIZE, make_tiny_checkpoint

OPTIONS = {"draft": "ngram", "verify": 2, "device": "cpu", "dtype": "float32", "cache_gb": 0.01}
GOOD = SamplingParams(max_tokens=4, ignore_eos=True)
DRAFTER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position": 1024,
    "norm_eps": 1e-6,
    "rope": RopeConfig(10000.0, 8, 8),
    "windows": (None,),
    "causal": (False,),
    "block_size": 5,
    "mask_token_id": 1,
    "tap_layers": (0, 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, **OPTIONS)


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """The model's folder, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def load(folder, **options):
    return LLM(str(folder), **{**OPTIONS, **options})


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm3-9b", "", "no/such/folder", "missing.gguf"])
def test_unknown_models(name):
    with pytest.raises(ModelNotFoundError, match="smollm2-135m.*org/name") as caught:
        load(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("option", ["model", "draft"])
@pytest.mark.parametrize("value", [7, True, 1.5, ["a"]])
def test_a_model_or_a_drafter_is_a_name(folder, option, value):
    arguments = {"model": folder, **OPTIONS, option: value}
    with pytest.raises(RequestError, match=f"{option} is .*name or a path") as caught:
        LLM(**arguments)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("place", ["model", "draft"])
def test_a_gated_model_is_explained(monkeypatch, folder, place):
    response = SimpleNamespace(status_code=403, headers={}, request=None, text="")

    def refuse(*arguments, **options):
        raise hub_errors.GatedRepoError("403", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    arguments = {"model": str(folder), **OPTIONS, place: "google/gemma-4-31B-it"}
    with pytest.raises(ModelNotFoundError, match="gemma-4-31B-it is gated: accept.*HF_TOKEN"):
        LLM(**arguments)


def test_a_file_that_is_no_model(copy):
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf"):
        load(copy / "model.safetensors")
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(copy)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_truncated_safetensors(copy, kept):
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(copy)


def test_corrupt_safetensors(copy):
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 64 + content[64:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(copy)
    path.write_bytes(content.replace(b"model.norm.weight", b"model.nerm.weight"))
    with pytest.raises(CheckpointError, match="model.norm.weight"):
        load(copy)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_truncated_gguf(tmp_path, kept):
    content = tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        load(path)


def test_corrupt_gguf(tmp_path):
    whole = tiny_gguf(tmp_path / "whole.gguf")
    content = whole.read_bytes()
    path = tmp_path / "bad.gguf"
    for damaged in (b"GGUX" + content[4:], content[:8] + b"\xff" * 16 + content[24:], b"\0" * 100):
        path.write_bytes(damaged)
        with pytest.raises(FlashdraftError, match=r"bad\.gguf"):
            load(path)
    assert len(load(whole).generate([5, 6], GOOD)[0].token_ids) == 4


def tiny_gguf(path: Path) -> Path:
    """A Llama of one layer, as llama.cpp's converter would write it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (40, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}_norm": (32,) for name in ("attn", "ffn")}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (32, 32) for name in matrices}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unsupported_architecture(copy):
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="(?i)mamba"):
        load(copy)


# -- drafters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden size is 48, the target's is 32"),
        ({"vocab_size": 301}, "vocabulary size is 301, the target's is 300"),
        ({"tap_layers": (0, 5)}, "layer 5.*the target has 2 layers"),
        ({"num_target_layers": 30}, "number of target layers is 30, the target's is 2"),
    ],
)
def test_a_drafter_that_does_not_fit(folder, tmp_path, llm, change, message):
    save_drafter(Drafter(DrafterConfig(**{**DRAFTER, **change})), tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}.*Use a drafter that was trained for"):
        load(folder, draft=str(tmp_path))
    assert len(llm.generate([5, 6], GOOD)[0].token_ids) == 4


def test_a_broken_drafter(folder, tmp_path):
    save_drafter(Drafter(DrafterConfig(**DRAFTER)), tmp_path)
    assert len(load(folder, draft=tmp_path).generate([5, 6], GOOD)[0].token_ids) == 4
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder, draft=tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        load(folder, draft=tmp_path)
    with pytest.raises(UnsupportedModelError, match="not a block drafter"):
        load(folder, draft=folder)
    with pytest.raises(FlashdraftError):
        load(folder, draft=tiny_gguf(tmp_path / "drafter.gguf"))
    with pytest.raises(ModelNotFoundError, match="no-such-drafter"):
        load(folder, draft="no-such-drafter")


# -- settings of the engine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"verify": -1}, RequestError, "verify is -1.*0 to 15"),
        ({"verify": 64}, RequestError, "verify is 64.*0 to 15"),
        ({"verify": "fast"}, RequestError, "verify is 'fast'.*auto"),
        ({"verify": 2.5}, RequestError, r"verify is 2\.5.*auto"),
        ({"verify": True}, RequestError, "verify is True"),
        ({"verify": None}, RequestError, "verify is None"),
        ({"tree": "auto"}, RequestError, "tree is 'auto', but no drafter.*Name one with draft"),
        ({"tree": 15, "draft": None}, RequestError, "tree is 15, but no drafter"),
        ({"tree": 0, "draft": "."}, RequestError, "tree is 0.*from 1 to 63"),
        ({"tree": 64, "draft": "."}, RequestError, "tree is 64.*from 1 to 63"),
        ({"tree": True, "draft": "."}, RequestError, "tree is True"),
        ({"tree": "many", "draft": "."}, RequestError, "tree is 'many'.*'off'.*'auto'"),
        (
            {"tree": 15, "draft": "."},
            RequestError,
            "tree is 15, but a fixed verify length .2.*one of",
        ),
        ({"cache_gb": 1e-6}, CapacityError, r"cache_gb is 0\.000001; a single page.*Raise"),
        ({"cache_gb": 0}, RequestError, "cache_gb is 0.*above 0"),
        ({"cache_gb": -1.0}, RequestError, r"cache_gb is -1\.0"),
        ({"cache_gb": math.nan}, RequestError, "cache_gb is nan"),
        ({"cache_gb": math.inf}, RequestError, "cache_gb is inf"),
        ({"cache_gb": "1"}, RequestError, "cache_gb is '1'"),
        ({"max_context": 5000}, CapacityError, "max_context is 5000; at most 1024.*positions"),
        ({"max_context": 1000, "cache_gb": 1e-4}, CapacityError, "max_context is 1000.*cache_gb"),
        ({"max_context": 1}, RequestError, "max_context is 1.*at least 2"),
        ({"max_context": 20.5}, RequestError, r"max_context is 20\.5"),
        ({"max_context": True}, RequestError, "max_context is True"),
        ({"max_batch": 0}, RequestError, "max_batch is 0.*at least 1"),
        ({"max_batch": "8"}, RequestError, "max_batch is '8'"),
        ({"dtype": "float8"}, RequestError, "dtype is 'float8'.*bfloat16"),
        ({"dtype": torch.float32}, RequestError, r"dtype is torch\.float32.*bfloat16"),
        ({"dtype": None}, RequestError, "dtype is None"),
        ({"device": "tpu"}, RequestError, "device is 'tpu'.*cpu"),
        ({"device": None}, RequestError, "device is None.*cpu"),
        ({"device": 1.5}, RequestError, r"device is 1\.5.*cpu"),
    ],
)
def test_settings(folder, options, error, message):
    with pytest.raises(error, match=message):
        load(folder, **options)


def test_no_cuda_device(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="device is 'cuda'.*use device='cpu'"):
        load(folder, device="cuda")


def test_out_of_memory_while_loading(folder, monkeypatch):
    for place in ("flashdraft.models.pairs.build_target", "flashdraft.llm.loaded.Engine"):
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("x")))
            with pytest.raises(CapacityError, match="does not fit.*smaller"):
                load(folder)


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("min_tokens", -1),
        ("min_tokens", 300),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {-3: 1.0}),
        ("logprobs", 21),
    ],
)
def test_sampling_params(field, value):
    with pytest.raises(RequestError, match=f"{field} is .*it must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", RequestError, "prompt is empty.*at least one"),
        ([[]], RequestError, "prompt is empty.*at least one"),
        ([5, -1], RequestError, "Token id -1.*0 to 299.*tokenizer"),
        ([5, VOCAB_SIZE], RequestError, "Token id 300.*0 to 299.*tokenizer"),
        ([True, False], RequestError, "holds True"),
        ([5, False], RequestError, "holds False"),
        ([5.0, 6.0], RequestError, r"holds 5\.0"),
        ([5, "six"], RequestError, "holds 'six'"),
        ([5, None], RequestError, "holds None"),
        ([[5], [6, -7]], RequestError, "Token id -7"),
        ([{"role": "user", "content": "hi"}], RequestError, "prompt is {.*'role'.*messages: chat"),
        (None, RequestError, "prompts is None.*text"),
        (5, RequestError, "prompts is 5.*text"),
        (b"bytes", RequestError, "prompts is b'bytes'.*text"),
        ({5: 6}, RequestError, "prompts is {5: 6}.*text"),
        (["good", None], RequestError, "prompt is None.*text"),
        (["good", 7], RequestError, "prompt is 7.*text"),
        ("\ud800", RequestError, "valid Unicode"),
        ([5] * 1024, ContextLengthError, "1024 tokens; the context holds 1024.*Shorten"),
        (["good", [5] * 2000], ContextLengthError, "2000 tokens"),
        ("dog " * 2000, ContextLengthError, "tokens; the context holds 1024"),
    ],
)
def test_prompts_are_refused_and_the_next_one_is_answered(llm, prompt, error, message):
    expected = llm.generate([5, 6], GOOD)[0].token_ids
    with pytest.raises(error, match=message):
        llm.generate(prompt, GOOD)
    assert not llm.engine.has_work and not llm._mailboxes
    llm.engine.check_integrity()
    assert llm.generate([5, 6], GOOD)[0].token_ids == expected


@pytest.mark.parametrize("prompt", ["", [5, -1], [True], None, 5, [5] * 1024, "\ud800"])
def test_streams_refuse_the_same(llm, prompt):
    with pytest.raises(RequestError):
        next(llm.stream(prompt, GOOD))
    assert not llm.engine.has_work and not llm._mailboxes
    assert len(llm.generate([5, 6], GOOD)[0].token_ids) == 4


@pytest.mark.parametrize("verify", [-1, 1.5, True, "2"])
def test_a_streams_verify_length(llm, verify):
    with pytest.raises(RequestError, match="verify is"):
        next(llm.stream([5, 6], GOOD, verify=verify))
    assert len(list(llm.stream([5, 6], GOOD, verify=2))) > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias names token 300.*299"),
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids names token 300.*299"),
        ({"max_tokens": 4}, "it must be SamplingParams"),
        ([{"max_tokens": 4}], "it must be SamplingParams"),
        ("greedy", "SamplingParams"),
        (7, "it must be SamplingParams"),
    ],
)
def test_params_that_do_not_fit(llm, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([5, 6], params)
    assert len(llm.generate([5, 6], GOOD)[0].token_ids) == 4


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        None,
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [7],
    ],
)
def test_chat_messages(llm, messages):
    with pytest.raises(RequestError, match="message"):
        llm.chat(messages, GOOD)
    assert len(llm.chat([{"role": "user", "content": "hi"}], GOOD).token_ids) == 4


def test_pictures_for_a_model_that_sees_none(llm):
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    with pytest.raises(RequestError, match="sees no pictures"):
        llm.chat([{"role": "user", "content": [shown]}], GOOD)
    assert len(llm.chat([{"role": "user", "content": "hi"}], GOOD).token_ids) == 4


def test_names_too_long_for_a_file_and_tools_that_are_no_list(folder):
    with pytest.raises(ModelNotFoundError, match="There is no model 'xxx"):
        LLM("x" * 5000)
    llm = load(folder)
    with pytest.raises(RequestError, match="tools is 5; it must be a list"):
        llm.chat([{"role": "user", "content": "hi"}], tools=5)
    with pytest.raises(RequestError, match=r"holds True \(bool\)"):
        llm.generate([[5, True]])
