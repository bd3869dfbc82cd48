"""Quantization of activations with a scale for each row, and the largest magnitude of a whole activation."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from b12x_core.kernels import vectors
from b12x_core.kernels.convert import divide_all, divide_by_constant, divisor, from_bits, largest_of, round_all
from b12x_core.planning.quantize import QuantizeConfig


@cute.jit
def _load_chunk(
    words: cute.Tensor, row_address: Int64, column: Int32, k: Int32, config: cutlass.Constexpr, first: Int32 = 0
):
    """The vectors of a thread in the chunk where `column` lies, from the `first` on and then those before it."""
    for i in cutlass.range_constexpr(config.vectors):
        start = column + (first + i) * config.threads * config.width
        if cutlass.const_expr(config.parts > 1):
            if first + i >= config.vectors:
                start = start - config.chunk
        source = row_address + Int64(start) * vectors.BYTES[config.x]
        vectors.load(words[None, i], source, k - start, config.x, config.aligned)


@cute.jit
def _largest_of_cta(amax: Uint32, config: cutlass.Constexpr):
    """The largest of the magnitudes of all threads."""
    amax = cute.arch.warp_redux_sync(amax, "umax")
    warps = cutlass.const_expr(config.threads * config.rows // 32)
    if cutlass.const_expr(warps > 1):
        tid, _, _ = cute.arch.thread_idx()
        shared = cutlass.utils.SmemAllocator().allocate_tensor(Uint32, cute.make_layout(warps), 16)
        if tid % 32 == 0:
            shared[tid // 32] = amax
        cute.arch.sync_threads()
        amax = Uint32(0)
        if tid % 32 < warps:
            amax = shared[tid % 32]
        amax = cute.arch.warp_redux_sync(amax, "umax")
    return amax


@cute.jit
def _store_chunk(
    words: cute.Tensor,
    q: cute.Tensor,
    row: Int32,
    column: Int32,
    k: Int32,
    by: cutlass.Constexpr,
    config: cutlass.Constexpr,
):
    for i in cutlass.range_constexpr(config.vectors // config.parts):
        start = column + i * config.threads * config.width
        wide = vectors.values(words[None, i], config.x)
        divide_all(wide, by)
        if cutlass.const_expr(config.layout == "values"):
            round_all(wide, config.element)
        vectors.store(q, row, start, wide, k - start, config.stored, config.aligned)


@cute.kernel
def _row_kernel(x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, config: cutlass.Constexpr):
    cute.arch.griddepcontrol_launch_dependents()
    tid, _, _ = cute.arch.thread_idx()
    row, part, _ = cute.arch.block_idx()
    column = tid * config.width
    k = x.shape[1]
    words = vectors.register_words(config.x, config.width, config.vectors)
    address = x.iterator.toint() + Int64(row) * x.stride[0] * vectors.BYTES[config.x]
    cute.arch.griddepcontrol_wait()
    amax = Uint32(0)
    chunks = cute.ceil_div(q.shape[1], config.chunk)
    if cutlass.const_expr(config.resident):
        first = Int32(0)
        if cutlass.const_expr(config.parts > 1):  # what this CTA quantizes comes first, so that it stays in registers
            first = part * (config.vectors // config.parts)
        _load_chunk(words, address, column, k, config, first)
        column = column + first * config.threads * config.width
        amax = vectors.magnitude_of_all(words, config.x)
    else:
        for i in cutlass.range(chunks, unroll=1):
            _load_chunk(words, address, column + i * config.chunk, k, config)
            amax = largest_of(amax, vectors.magnitude_of_all(words, config.x))
    amax = _largest_of_cta(amax, config)
    step = divide_by_constant(from_bits(amax), config.largest)
    by = divisor(step, amax, config.x)
    if (tid == 0) & (part == 0):
        scale[row] = step
    if cutlass.const_expr(config.resident):
        _store_chunk(words, q, row, column, k, by, config)
    else:
        for i in cutlass.range(chunks, unroll=1):
            _load_chunk(words, address, column + i * config.chunk, k, config)
            _store_chunk(words, q, row, column + i * config.chunk, k, by, config)


@cute.kernel
def _amax_kernel(x: cute.Tensor, partial: cute.Tensor, config: cutlass.Constexpr):
    cute.arch.griddepcontrol_launch_dependents()
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    k = x.shape[1]
    words = vectors.register_words(config.x, config.width, config.vectors)
    cute.arch.griddepcontrol_wait()
    amax = Uint32(0)
    # CTAs take turns at chunks of groups of rows
    chunks = cute.ceil_div(k, config.chunk)
    group = cta // chunks
    chunk = cta % chunks
    column = tid % config.threads * config.width
    while group * config.rows < x.shape[0]:
        row = group * config.rows + tid // config.threads
        address = x.iterator.toint() + Int64(row) * x.stride[0] * vectors.BYTES[config.x]
        if row < x.shape[0]:
            _load_chunk(words, address, chunk * config.chunk + column, k, config)
            amax = largest_of(amax, vectors.magnitude_of_all(words, config.x))
        chunk = chunk + ctas
        group = group + chunk // chunks
        chunk = chunk % chunks
    amax = _largest_of_cta(amax, config)
    if tid == 0:
        partial[cta] = from_bits(amax)


def compile(config: QuantizeConfig, options: str):
    """Compile a configuration whose step is "row" or "amax"."""
    block = (config.threads * config.rows, 1, 1)

    @cute.jit
    def launch_row(x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, stream):
        _row_kernel(x, q, scale, config).launch(
            grid=(x.shape[0], config.parts, 1), block=block, stream=stream, use_pdl=True
        )

    @cute.jit
    def launch_amax(x: cute.Tensor, partial: cute.Tensor, ctas: Int32, stream):
        _amax_kernel(x, partial, config).launch(grid=(ctas, 1, 1), block=block, stream=stream, use_pdl=True)

    x = vectors.fake_activation(config.x, config.aligned)
    numbers = make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if config.step == "amax":
        return cute.compile(launch_amax, x, numbers, Int32(1), stream, options=options)
    return cute.compile(launch_row, x, vectors.fake_codes(config.stored), numbers, stream, options=options)
