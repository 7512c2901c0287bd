"""The Triton kernels compile for a Hopper GPU, and fit it, on a machine that has none.

Every launch the backend makes is caught and compiled instead, with its real arguments. That is done
in another process, this file as a script, since Triton may be in interpreter mode here.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdraft.kernels.cuda.plan import (
    DeviceLimits,
    plan_attention,
    plan_exact_attention,
    plan_exact_linear,
    plan_linear,
)
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    Heads,
    PagedKeys,
    PageView,
    QKVSpec,
    RopeTable,
    Trees,
)
from flashdraft.kernels.kinds import Activation

HOPPER = DeviceLimits(num_processors=132, shared_bytes=227 * 1024)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
TREES = BlockMask(trees=Trees(torch.full((16,), -1), torch.arange(16, dtype=torch.int32)))
# dtype, head size, (heads, key heads), rows, keys, window, mask
ATTENTION: dict[str, tuple[torch.dtype, int, tuple[int, int], int, int, int | None, BlockMask]] = {
    "verify 64 trees": (torch.float16, 64, (9, 3), 16, 100, None, TREES),
    "verify 512 split": (torch.bfloat16, 512, (32, 4), 16, 4096, 2048, BIDIRECTIONAL),
    "exact 256": (torch.bfloat16, 256, (32, 16), 1, 4096, 1024, CAUSAL),
    "decode 64 split": (torch.float32, 64, (9, 3), 1, 1000, None, CAUSAL),
}
KERNELS = {"_attend", "_merge", "_norm", "_gate", "_prepare", "_multiply", "_finish_piece"}
TRAINING = {"_loss_row"}  # launched plainly, among torch's kernels
READ_EARLY = {
    "_attend",
    "_norm",
    "_prepare",
    "_residual_norms",
    "_route",
}  # weights and tables: overlap.py
STREAMING = {"_attend", "_multiply"}  # these must copy while they compute


class Catcher:
    """Stands in for a Triton kernel: compiles for compute capability 9.0 what it should launch."""

    def __init__(self, function: Any, compiled: list[tuple[str, int]]) -> None:
        self.function = function
        self.compiled = compiled
        self.waits: list[bool] = []  # of each launch: whether it copies only between computing

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self.compile

    def compile(
        self,
        *values: Any,
        num_warps: int,
        num_stages: int = 3,
        launch_pdl: bool = False,
        **named: Any,
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        arguments = dict(zip(self.function.arg_names, values, strict=False)) | named
        types, constants, hints = {}, {}, {}
        for index, parameter in enumerate(self.function.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                types[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            is_tensor = isinstance(value, torch.Tensor)
            numbers = "fp32" if isinstance(value, float) else "i32"
            types[parameter.name] = TYPES[value.dtype] if is_tensor else numbers
            if is_tensor or (value % 16 == 0 and not parameter.do_not_specialize):
                hints[(index,)] = [["tt.divisibility", 16]]
        kernel = triton.compile(
            ASTSource(self.function, types, constants, hints),
            target=GPUTarget("cuda", 90, 32),
            options={
                "num_warps": num_warps,
                "num_stages": num_stages,
                "launch_pdl": launch_pdl,
            },
        )
        if self.function.__name__ not in TRAINING:
            check_overlap(self.function.__name__, launch_pdl, kernel.asm["ptx"])
        self.compiled.append((self.function.__name__, kernel.metadata.shared))
        is_half = any(kind in types.values() for kind in ("*bf16", "*fp16"))
        self.waits.append(is_half and "cp.async" not in kernel.asm["ptx"])


def check_overlap(name: str, launch_pdl: bool, ptx: str) -> None:
    """Every kernel may start early, and writes only after it has waited; few read before."""
    assert launch_pdl, f"{name} is launched plainly"
    assert "griddepcontrol.launch_dependents" in ptx, f"{name} does not signal"
    before, found, after = ptx.partition("griddepcontrol.wait")
    assert found and "griddepcontrol.wait" not in after, f"{name} must wait exactly once"
    early = set(re.findall(r"\b(st|ld|atom|red|cp)\.[\w.:]*global", before))
    assert early <= ({"ld"} if name in READ_EARLY else set()), f"{name}: {early} before its wait"
    assert not re.search(r"\bret;", before), f"{name} may end without having waited"


def compile_attention(name: str) -> None:
    from flashdraft.kernels.cuda.attention.paged import paged_attention

    dtype, head_dim, (heads, kv_heads), num_rows, num_keys, window, mask = ATTENTION[name]
    cache = torch.empty(1, 16, kv_heads, head_dim, dtype=dtype)
    view = PageView(
        query_start=torch.tensor([0, num_rows], dtype=torch.int32),
        context_lens=torch.tensor([num_keys - num_rows], dtype=torch.int32),
        block_table=torch.zeros(1, num_keys // 16 + 1, dtype=torch.int32),
        slots=torch.empty(0, dtype=torch.int64),
        page_size=16,
        max_query_len=num_rows,
        max_key_len=num_keys,
    )
    query = torch.empty(num_rows, heads, head_dim, dtype=dtype)
    make_plan = plan_exact_attention if name.startswith("exact") else plan_attention
    keys = PagedKeys(cache, cache, view, scale=1.0, window=window, mask=mask)
    plan = make_plan(query, keys, HOPPER)
    assert (plan.num_splits > 1) == (num_keys >= 1000)
    paged_attention(query, keys, plan)


def compile_rows() -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(torch.device("cpu"), torch.bfloat16)
    x, weight = torch.empty(2, 5376, dtype=torch.bfloat16), torch.empty(5376)
    kernels.rms_norm(x, None, 1e-6)
    kernels.add_rms_norm(x, x, weight, 1e-6)
    for activation in Activation:
        kernels.gated(x, activation)
    norm, rope = torch.empty(512), RopeTable(torch.empty(9, 256), torch.empty(9, 256))
    cache = torch.empty(1, 16, 2, 512, dtype=torch.bfloat16)
    rows = torch.zeros(1, dtype=torch.int64)
    for spec in (
        QKVSpec(4, 2, 512, 1e-6),
        QKVSpec(4, 2, 512, 1e-6, q_norm=norm, k_norm=norm, v_norm=True, share_kv=True),
        QKVSpec(0, 2, 512, 1e-6, k_norm=norm),
    ):
        qkv = torch.empty(1, spec.width, dtype=torch.bfloat16)
        kernels.prepare_qkv(qkv, Heads(spec, rope, rows), cache, cache, rows)


def compile_linears() -> None:
    from flashdraft.kernels.cuda.dense.linear import multiply_rows
    from flashdraft.kernels.cuda.dense.logits import finish_logits

    arrivals = torch.zeros(64, dtype=torch.int32)
    x, weight = torch.empty(1, 2112).bfloat16(), torch.empty(256, 2112).bfloat16()
    for plan in (
        plan_linear(16, 5376, 8192, 2, HOPPER),
        plan_linear(32, 2816, 2112, 2, HOPPER),
        plan_linear(1, 8192, 2816, 2, HOPPER),
        plan_linear(1, 4224, 2816, 2, HOPPER),
        plan_linear(16, 262144, 5376, 2, HOPPER),
        plan_exact_linear(5376, 21504, 2, HOPPER),
        plan_exact_linear(262144, 5376, 2, HOPPER),
    ):
        assert plan is not None
        multiply_rows(x, weight, plan, arrivals)
    finish_logits(x, 1.0, None, None)
    finish_logits(x, 1.0, 30.0, torch.zeros(2112, dtype=torch.bool))


def compile_everything() -> dict[str, Any]:
    """(kernel, bytes of shared memory) of every launch, and which kernels wait for their copies."""
    from flashdraft.kernels.cuda import overlap
    from flashdraft.kernels.cuda.attention import paged
    from flashdraft.kernels.cuda.dense import linear, logits
    from flashdraft.kernels.cuda.dense import rows as triton_rows

    overlap.can_overlap = functools.cache(lambda device: True)
    overlap.MAX_ROWS = overlap.MAX_SMALL_ROWS = 1 << 30  # of any number of rows
    compiled: list[tuple[str, int]] = []
    catchers: dict[str, Catcher] = {}
    for module in (paged, linear, logits, triton_rows):
        for name in KERNELS & vars(module).keys():
            catchers[name] = Catcher(getattr(module, name), compiled)
            setattr(module, name, catchers[name])
    for name in ATTENTION:
        compile_attention(name)
    compile_rows()
    compile_linears()
    waiting = [name for name, catcher in catchers.items() if any(catcher.waits)]
    return {"compiled": compiled, "waiting": waiting}


def test_every_kernel_compiles_and_fits_a_hopper_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    finished = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert {name for name, _ in found["compiled"]} == KERNELS
    assert [launch for launch in found["compiled"] if launch[1] > HOPPER.shared_bytes] == []
    assert not STREAMING & set(found["waiting"])


if __name__ == "__main__":
    json.dump(compile_everything(), sys.stdout)
