"""Attention of few rows in one launch, on a GPU: against torch, beside Triton's, and in graphs."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.interface import BIDIRECTIONAL, CAUSAL
from tests.unit.kernels.test_cuda_attention import CASES, FULL, expect, make_inputs

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
REAL = {
    "31B, sliding": (32, 16, 256, 1, 500, 1024, CAUSAL, {"v_norm": True}),
    "31B, sliding, block": (32, 16, 256, 16, 1200, 1024, CAUSAL, {"v_norm": True}),
    "31B, full": (32, 4, 512, 1, 500, None, CAUSAL, FULL),
    "31B, full, block": (32, 4, 512, 16, 700, None, CAUSAL, FULL),
    "26B, sliding, block": (16, 8, 256, 9, 70, 1024, CAUSAL, {"v_norm": True}),
    "26B, full": (16, 2, 512, 16, 2000, None, CAUSAL, FULL),
    "drafter": (32, 8, 128, 16, 300, None, BIDIRECTIONAL, {}),
    "drafter, sliding": (32, 8, 128, 16, 3000, 1024, BIDIRECTIONAL, {}),
}


def to_device(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return type(value)(**{k: to_device(getattr(value, k)) for k in value.__dataclass_fields__})


def make_kernels():
    from flashdraft.kernels.triton_backend import TritonKernels

    return TritonKernels(DEVICE, torch.bfloat16)


def attend(kernels, inputs, scale, window, mask):
    """By the kernel alone."""
    from flashdraft.kernels.cuda_attention import attend_few

    return attend_few(
        *inputs, kernels._meetings, kernels._limits, scale=scale, window=window, mask=mask
    )


@pytest.mark.parametrize("case", CASES | REAL)
def test_it_is_what_torch_says(case):
    *sizes, window, mask, of_spec = (CASES | REAL)[case]
    inputs, scale, kernels = make_inputs(*sizes, 0, of_spec), sizes[2] ** -0.5, make_kernels()
    expected = expect(inputs, scale, window, mask).float()
    ours = [to_device(value) for value in inputs]
    for cache in ours[4:6]:
        cache.flatten(0, 1)[ours[6].slots] = 0  # these it must write
    for _ in range(3):
        found = attend(kernels, ours, scale, window, mask)
        assert found is not None
        assert (found.cpu().float() - expected).norm() < 0.006 * expected.norm()
    for cache, wanted in zip(ours[4:6], inputs[4:6], strict=True):
        assert (cache.cpu().float() - wanted.float()).norm() < 0.002 * wanted.float().norm()


@pytest.mark.parametrize("case", ["31B, sliding", "31B, sliding, block", "31B, full, block"])
def test_it_starts_while_a_linear_ends(case):
    """Many steps in a graph, each linear's result prepared and read by the next kernel."""
    *sizes, window, mask, of_spec = REAL[case]
    kernels, scale = make_kernels(), sizes[2] ** -0.5
    ours = [to_device(value) for value in make_inputs(*sizes, 0, of_spec)]
    num_rows, width = ours[0].shape
    weight = kernels.pack(torch.randn(width, 1024, device=DEVICE).bfloat16() / 32)
    xs = [torch.randn(num_rows, 1024, device=DEVICE).bfloat16() for _ in range(20)]

    def run():
        options = {"scale": scale, "window": window, "mask": mask}
        return [kernels.attend(kernels.linear(x, weight), *ours[1:], **options) for x in xs]

    expected = []
    for x in xs:
        qkv = kernels.linear(x, weight)
        torch.cuda.synchronize()
        expected.append(attend(kernels, [qkv, *ours[1:]], scale, window, mask))
        torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
