"""out = a + addend."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from .configs import ToyConfig


def compile(config: ToyConfig, options: str = ""):
    @cute.kernel
    def kernel(a: cute.Tensor, out: cute.Tensor, n: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * config.threads + thread
        if i < n:
            out[i] = a[i] + cutlass.Float32(config.addend)

    @cute.jit
    def launch(a: cute.Tensor, out: cute.Tensor, n: cutlass.Int32, stream):
        grid = ((n + config.threads - 1) // config.threads, 1, 1)
        kernel(a, out, n).launch(grid=grid, block=(config.threads, 1, 1), stream=stream)

    size = cute.sym_int()
    vectors = [make_fake_compact_tensor(cutlass.Float32, (size,)) for _ in range(2)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *vectors, cutlass.Int32(1), stream, options=f"--enable-tvm-ffi {options}")
