"""Kernels that read memory, or multiply matrices in registers, and do nothing else."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from b12x_core.kernels.mma import BY_ACTIVATION
from b12x_core.planning.ceilings import CeilingConfig

_NEVER = 0x9E3779B9
"""A result that decides whether something is written: the compiler must compute it, and it does not come up."""


@cute.kernel
def _read_kernel(data: cute.Tensor, sink: cute.Tensor, size: Int64, config: cutlass.Constexpr):
    if cutlass.const_expr(config.overlap):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    chunk = cutlass.const_expr(config.threads * config.vectors * 16)
    words = cute.make_rmem_tensor(cute.make_layout((4, config.vectors), stride=(1, 4)), Uint32)
    words.fill(0)
    mix = Uint32(0)
    start = Int64(cta) * chunk
    while start < size:
        first = start + tid * 16
        for i in cutlass.range_constexpr(config.vectors):
            offset = first + i * config.threads * 16
            if offset < size:
                pointer = cute.make_ptr(
                    Uint32, data.iterator.toint() + offset, cute.AddressSpace.gmem, assumed_align=16
                )
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words[None, i])
        for i in cutlass.range_constexpr(config.vectors):
            mix = mix ^ words[0, i] ^ words[1, i] ^ words[2, i] ^ words[3, i]
        start = start + Int64(ctas) * chunk
    if mix == Uint32(_NEVER):
        sink[0] = mix


@cute.kernel
def _mma_kernel(sink: cute.Tensor, loops: Int32, config: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    multiply = BY_ACTIVATION[config.element]
    rows, columns = cutlass.const_expr((config.rows, config.columns))
    acc = cute.make_rmem_tensor((4, rows, columns), Float32)
    acc.fill(0.0)
    # bits that are moderate numbers of either sign in both element types, and differ from thread to thread
    noise = [(Uint32(tid) * Uint32(0x9E3779B1 + 2 * i)) & Uint32(0xBFBFBFBF) for i in range(4 * rows + 2 * columns)]
    a = [noise[4 * i : 4 * i + 4] for i in range(rows)]
    b = cute.make_rmem_tensor((2, columns), Uint32)
    for i in cutlass.range_constexpr(2 * columns):
        b[i % 2, i // 2] = noise[4 * rows + i]
    for _ in cutlass.range(loops, unroll=1):
        for j in cutlass.range_constexpr(columns):
            if cutlass.const_expr(config.element == "e4m3"):
                # Where ptxas builds this instruction out of others, it adds the accumulator to the product in the
                # end, and would take a product that repeats out of the loop.
                b[0, j] = b[0, j] ^ Uint32(0x01010101)
                b[1, j] = b[1, j] ^ Uint32(0x01010101)
            for i in cutlass.range_constexpr(rows):
                result = multiply(a[i], [b[0, j], b[1, j]], [acc[n, i, j] for n in range(4)])
                for n in cutlass.range_constexpr(4):
                    acc[n, i, j] = result[n]
    total = Float32(0.0)
    for n in cutlass.range_constexpr(cute.size(acc)):
        total = total + acc[n]
    if total == Float32(1.2345678e-30):
        sink[0] = Uint32(1)


def compile(config: CeilingConfig, options: str = ""):
    """Compile a configuration; what to call stands in `CeilingConfig`."""
    block = (config.threads, 1, 1)

    @cute.jit
    def launch_read(data: cute.Tensor, sink: cute.Tensor, nbytes: Int64, ctas: Int32, stream):
        _read_kernel(data, sink, nbytes, config).launch(
            grid=(ctas, 1, 1), block=block, stream=stream, use_pdl=config.overlap
        )

    @cute.jit
    def launch_mma(sink: cute.Tensor, loops: Int32, ctas: Int32, stream):
        _mma_kernel(sink, loops, config).launch(grid=(ctas, 1, 1), block=block, stream=stream)

    sink = make_fake_compact_tensor(Uint32, (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi {options}"
    if config.kind == "mma":
        return cute.compile(launch_mma, sink, Int32(1), Int32(1), stream, options=options)
    data = make_fake_compact_tensor(Uint8, (cute.sym_int64(),), assumed_align=16)
    return cute.compile(launch_read, data, sink, Int64(16), Int32(1), stream, options=options)
