"""Launches that only have their kernels compiled, each once, by several threads.

For a process that has no other work: what it compiles is found in Triton's cache on disk by the one
that launches. Tensors have no values (card.py), and no GPU is touched. Of Triton's own parts this
needs `JITFunction.run`, `_do_compile` and `AsyncCompileMode`, as 3.6 to 3.9 have them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from flashdraft.kernels.cuda import card
from flashdraft.kernels.cuda.driver import Kernel, compile_once

WARP = 32  # threads
_LATER = object()  # in place of a kernel that is on its way


@contextmanager
def compiling_only(capability: tuple[int, int], num_threads: int) -> Iterator[None]:
    """Launch nothing meanwhile; all that was to be launched is compiled when this has ended.

    A kernel that does not compile is left to whoever needs it. Triton takes the card for the one
    that is there from then on.
    """
    card.tell(capability)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], WARP)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    run, compile_kernel = JITFunction.run, JITFunction._do_compile
    nothing = SimpleNamespace(launch=lambda *values, **named: None)

    def compile_soon(self: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        run(self, *values, grid=grid, warmup=True, **named)

    def compile_once_only(self: Any, key: Any, *rest: Any, **named: Any) -> None:
        compile_kernel(self, key, *rest, **named)
        self.device_caches[0][0][key] = _LATER  # 3.6 forgets what it was asked for

    @functools.cache
    def load(file: str, name: str, device: torch.device, *flags: tuple[str, int]) -> Any:
        executor.submit(compile_once, file, dict(flags), device)
        return nothing

    with (
        patch.object(JITFunction, "run", compile_soon),
        patch.object(JITFunction, "_do_compile", compile_once_only),
        patch.object(Kernel, "load", load),
        ThreadPoolExecutor(num_threads) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
    ):
        yield
