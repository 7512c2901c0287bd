"""Attention of few rows in one launch, on a GPU: against torch, beside Triton's, and in graphs."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.interface import BIDIRECTIONAL, CAUSAL, Heads, PagedKeys
from flashdraft.kernels.kinds import Scheme
from tests.tree_rows import random_tree
from tests.unit.kernels.cuda.attention.test_few_rows import (
    CASES,
    FULL,
    expect,
    make_inputs,
    see_tree,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
A_TREE = see_tree(16, random_tree(16, 7, 0))
REAL = {
    "31B, sliding": (32, 16, 256, 1, 500, 1024, CAUSAL, {"v_norm": True}),
    "31B, sliding, block": (32, 16, 256, 16, 1200, 1024, CAUSAL, {"v_norm": True}),
    "31B, full": (32, 4, 512, 1, 500, None, CAUSAL, FULL),
    "31B, full, block": (32, 4, 512, 16, 700, None, CAUSAL, FULL),
    "26B, sliding, block": (16, 8, 256, 9, 70, 1024, CAUSAL, {"v_norm": True}),
    "26B, full": (16, 2, 512, 16, 2000, None, CAUSAL, FULL),
    "31B, sliding, a tree": (32, 16, 256, 16, 1200, 1024, A_TREE, {"v_norm": True}),
    "31B, full, a tree": (32, 4, 512, 16, 700, None, A_TREE, FULL),
    "26B, a small window, a tree": (16, 8, 256, 16, 300, 40, A_TREE, {"v_norm": True}),
    "drafter": (32, 8, 128, 16, 300, None, BIDIRECTIONAL, {}),
    "drafter, sliding": (32, 8, 128, 16, 3000, 1024, BIDIRECTIONAL, {}),
}


def to_device(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return type(value)(**{k: to_device(getattr(value, k)) for k in value.__dataclass_fields__})


def make_kernels(scheme=None):
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(DEVICE, torch.bfloat16, quantize=scheme)


def attend(kernels, inputs, scale, window, mask):
    """By the kernel alone."""
    from flashdraft.kernels.cuda.attention.few_rows import attend_few

    keys = PagedKeys(*inputs[4:], scale=scale, window=window, mask=to_device(mask))
    return attend_few(inputs[0], Heads(*inputs[1:4]), keys, kernels._meetings, kernels._limits)


def test_a_captured_launch_follows_its_trees():
    """What rows see is data."""
    *sizes, window, mask, of_spec = REAL["26B, a small window, a tree"]
    inputs, scale, kernels = make_inputs(*sizes, 0, of_spec), sizes[2] ** -0.5, make_kernels()
    ours, placed = [to_device(value) for value in inputs], to_device(mask)
    attend(kernels, ours, scale, window, placed)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(kernels, ours, scale, window, placed)
    for tree in (random_tree(16, 3, 1), [0] * 15, None, random_tree(16, 9, 2)):
        mask = see_tree(16, tree)
        placed.trees.ancestors.copy_(mask.trees.ancestors)
        placed.trees.depths.copy_(mask.trees.depths)
        graph.replay()
        expected = expect(inputs, scale, window, mask).float()
        assert (found.cpu().float() - expected).norm() < 0.006 * expected.norm()


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


@pytest.mark.parametrize(
    "case",
    ["31B, sliding", "31B, sliding, block", "31B, full, block", "31B, sliding, a tree"],
)
def test_it_starts_while_a_linear_ends(case, monkeypatch):
    """Many steps in a graph, each linear's result prepared and read by the next kernel."""
    from flashdraft.kernels.cuda.quantized import few_rows

    monkeypatch.setattr(few_rows, "MIN_VALUES", 0)  # so that all linears signal early
    *sizes, window, mask, of_spec = REAL[case]
    kernels, scale, mask = make_kernels(Scheme.INT4), sizes[2] ** -0.5, to_device(mask)
    ours = [to_device(value) for value in make_inputs(*sizes, 0, of_spec)]
    num_rows, width = ours[0].shape
    weight = kernels.pack(torch.randn(width, 1024, device=DEVICE).bfloat16() / 32)
    xs = [torch.randn(num_rows, 1024, device=DEVICE).bfloat16() for _ in range(20)]

    def run():
        keys = PagedKeys(*ours[4:], scale=scale, window=window, mask=mask)
        return [kernels.attend(kernels.linear(x, weight), Heads(*ours[1:4]), keys) for x in xs]

    view, positions = ours[6], ours[3]
    tables = (view.context_lens, view.slots, positions, view.block_table)
    others = [[table.clone() for table in tables] for _ in range(3)]
    for i, (context, slots, place, pages) in enumerate(others):  # what a step reads before its wait
        context -= 17 * i
        place -= 2 * i
        pages.copy_(pages[:, torch.randperm(pages.shape[1], device=DEVICE)])
        keys = torch.arange(num_rows, device=DEVICE) + context
        slots.copy_(
            pages[0, keys // view.page_size].long() * view.page_size + keys % view.page_size
        )

    def use(values):
        for table, value in zip(tables, values, strict=True):
            table.copy_(value)

    caches = [cache.clone() for cache in ours[4:6]]

    def start(values):
        for cache, value in zip(ours[4:6], caches, strict=True):
            cache.copy_(value)
        use(values)

    expected = []
    for values in others:
        start(values)
        expected.append([])
        for x in xs:
            qkv = kernels.linear(x, weight)
            torch.cuda.synchronize()
            expected[-1].append(attend(kernels, [qkv, *ours[1:]], scale, window, mask))
            torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
        differences = []
        for i in range(30):  # the host never waits
            start(others[i % len(others)])
            graph.replay()
            pairs = zip(found, expected[i % len(others)], strict=True)
            differences += [(one != other).sum() for one, other in pairs]
    torch.cuda.synchronize()
    assert not torch.stack(differences).any()
