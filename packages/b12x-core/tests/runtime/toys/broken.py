"""A kernel that the compiler refuses."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from .configs import ToyConfig


def compile(config: ToyConfig, options: str = ""):
    @cute.kernel
    def kernel(a: cute.Tensor):
        a[0] = no_such_value  # noqa: F821

    @cute.jit
    def launch(a: cute.Tensor, stream):
        kernel(a).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    vector = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, vector, stream, options=f"--enable-tvm-ffi {options}")
