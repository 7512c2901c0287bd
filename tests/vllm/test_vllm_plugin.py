"""The plugin's parts by themselves, and its entry point in a real vLLM without a drafter."""

from __future__ import annotations

import ast
import logging
import math
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashdraft.external import vllm_plugin
from flashdraft.external.vllm_plugin import cpu, scaling
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import AUTOGRAD
from tests.vllm.gemma_pair import DRAFTER
from tests.vllm.vllm_processes import run_python

GEMMA = SimpleNamespace(model_type="gemma4_text", hidden_size=2816)
QWEN = SimpleNamespace(model_type="qwen3", hidden_size=2816)


def fake_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = types.ModuleType("vllm")
    module.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0", "1.0.0", "0.3.2"])
def test_it_stays_out_of_unknown_releases_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    fake_vllm(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    [record] = caplog.records
    assert f"stays out: this is vLLM {version}, and it knows 0.28 to 0.32" in record.getMessage()


def test_it_leaves_a_cpu_sampler_alone_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm(monkeypatch, "0.30.1")
    monkeypatch.setattr(vllm_plugin, "_register_drafter", lambda: None)
    monkeypatch.setattr(vllm_plugin, "_is_on_cpu", lambda: True)
    monkeypatch.setattr(cpu, "mend", lambda: pytest.fail("it was not left alone"))
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    [record] = caplog.records
    assert "leaves vLLM 0.30.1's CPU sampler alone" in record.getMessage()


def test_its_entry_point_is_light() -> None:
    """vLLM imports it in every process; torch and our engine are not its to load."""
    program = (
        "import sys, flashdraft\n"
        "from flashdraft.external.vllm_plugin import register\n"
        "register()  # says that there is no vLLM, and stays out\n"
        "heavy = {'torch', 'numpy', 'vllm', 'flashdraft.llm', 'flashdraft.models'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "assert 'LLM' in dir(flashdraft) and callable(flashdraft.LLM)\n"
        "assert 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert "stays out: ModuleNotFoundError" in done.stderr


def test_an_error_of_its_own_is_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm(monkeypatch, "0.32.0+cpu")  # a vLLM without a single module
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    [record] = caplog.records
    assert "stays out: ModuleNotFoundError" in record.getMessage()
    assert record.exc_info is None


def test_it_imports_no_other_part_of_flashdraft() -> None:
    package = "flashdraft.external.vllm_plugin"
    for path in Path(vllm_plugin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flashdraft"):
                assert str(node.module).startswith(package), path.name


def drafter(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**DRAFTER, "final_logit_softcapping": None, **changes})


def test_embeddings_are_scaled_as_our_own_drafters_are() -> None:
    """For every way to name a scale; the target's own is 1 unless it is a Gemma 4."""
    options = DRAFTER["dflash_config"]
    for named in (None, 1.0, 2.5):
        changed = {"dflash_config": {**options, "input_embedding_scale": named}}
        ours = DrafterConfig.from_hf({**DRAFTER, **changed}).embed_scale
        for target, own in ((GEMMA, math.sqrt(2816)), (QWEN, 1.0)):
            expected = own if ours is None else ours
            assert (scaling.embed_scale(drafter(**changed), target) or 1.0) == expected


def test_speculators_drafters_are_left_alone() -> None:
    config = drafter(model_type="speculators", final_logit_softcapping=30.0)
    assert scaling.embed_scale(config, GEMMA) is None
    assert scaling.logit_scaling(config) is None


@pytest.mark.parametrize(("factor", "cap"), [(None, 30.0), (0.5, None), (0.5, 4.0), (None, None)])
def test_logits_are_multiplied_and_then_capped(factor: float | None, cap: float | None) -> None:
    options = {**DRAFTER["dflash_config"], "output_multiplier": factor}
    found = scaling.logit_scaling(drafter(dflash_config=options, final_logit_softcapping=cap))
    logits = torch.linspace(-20, 20, 41, dtype=torch.float64)
    expected = logits * (factor or 1.0)
    expected = expected if cap is None else torch.tanh(expected / cap) * cap
    if found is None:
        assert factor is None and cap is None
        return
    scale, soft_cap = found  # in vLLM's order: the cap first
    capped = logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap
    torch.testing.assert_close(capped * scale, expected)


def test_values_are_spread_over_rows_in_their_own_dtype() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperature = torch.full((5,), math.nan)
    cpu.expand_rows(temperature, torch.tensor([0.3, 0.9, 0.0]), ends, 0, 1)
    assert temperature.tolist() == pytest.approx([0.3, 0.3, 1.0, 1.0, 1.0])
    top_k = torch.zeros(5, dtype=torch.int32)
    cpu.expand_rows(top_k, torch.tensor([7, 8, 9], dtype=torch.int32), ends, 0, 0)
    assert top_k.tolist() == [7, 7, 9, 9, 9]


def test_no_rows_are_no_work() -> None:
    asked = cpu.RowsOrNothing(lambda logits, k: logits[:, : int(k.max())])
    empty = torch.empty(0, 9)
    assert asked(empty, torch.empty(0)) is empty
    assert asked(torch.zeros(2, 9), torch.tensor([3, 4])).shape == (2, 4)


def test_every_layer_has_its_own_norm() -> None:
    torch.manual_seed(0)
    keys, weights = torch.randn(3, 5, 2, 8), torch.rand(3, 8) + 0.5
    model = SimpleNamespace(_rms_norm_eps=1e-6, _k_norm_weights=weights)
    cpu.mend_context_norm(model)
    expected = [AUTOGRAD.rms_norm(k, w, 1e-6) for k, w in zip(keys, weights, strict=True)]
    torch.testing.assert_close(model._normalize_context_k(keys), torch.stack(expected))


LOADED = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from flashdraft.external.vllm_plugin import cpu, register
register()  # a second time does no harm
from vllm.model_executor.models.registry import ModelRegistry
model = ModelRegistry.models["DFlashDraftModel"]
assert model.module_name == "flashdraft.external.vllm_plugin.draft_model", model
ours = [name for name, one in ModelRegistry.models.items() if "flashdraft" in str(one)]
assert ours == ["DFlashDraftModel"], ours
from vllm.utils import cpu_triton_utils
assert cpu_triton_utils._expand_kernel_impl is cpu.expand_rows
from vllm.v1.sample.ops import topk_topp_sampler
import inspect, torch
k_only = topk_topp_sampler.apply_top_k_only
assert isinstance(k_only, cpu.RowsOrNothing) and not isinstance(k_only._function, cpu.RowsOrNothing)
kept = k_only(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]))
assert kept.tolist() == [[float("-inf"), 3.0, 2.0]], kept
from vllm.v1.sample import rejection_sampler
kernel = rejection_sampler.expand_kernel
names = inspect.signature(getattr(kernel, "func", kernel)).parameters
assert len(names) == len(inspect.signature(cpu.expand_rows).parameters), names
print("loaded")
"""


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_finds_it_and_what_it_replaces(vllm_python: Path) -> None:
    done = run_python(vllm_python, ["-c", LOADED], 240)
    assert done.returncode == 0 and done.stdout.strip().endswith("loaded"), done.stdout[-3000:]
