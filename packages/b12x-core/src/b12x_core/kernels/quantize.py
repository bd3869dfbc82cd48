"""Quantization of activations: blocks along K and given scales. The table of formats stands in `reference.quantize`.

A thread handles a vector at a time; the threads of a block agree on its largest magnitude by exchanges inside a warp.
Rows of a CTA lie in different warps.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from b12x_core.kernels import quantize_rows, vectors
from b12x_core.kernels.convert import (
    bits,
    divide_all,
    divide_by_constant,
    divide_or_zero,
    divisor,
    e4m3_code,
    e4m3_value,
    e8m0_code_up,
    e8m0_inverse,
    e8m0_value,
    from_bits,
    largest_of,
    multiply,
    round_all,
)
from b12x_core.planning.quantize import PARTIALS, QuantizeConfig


@cute.jit
def _store_scale(scale: cute.Tensor, row: Int32, column: Int32, k: Int32, code, config: cutlass.Constexpr):
    """The scale of the block of a row that begins at `column`, where the layout has it; 0 beyond K, if it has that."""
    code = code.to(scale.element_type)
    if cutlass.const_expr(config.tile_k):
        if column >= k:
            code = Uint8(0)
        if column < scale.shape[0] * config.tile_k:
            scale[column // config.tile_k, row, column % config.tile_k // config.block] = code
    elif column < k:
        if cutlass.const_expr(config.layout == "k-major"):
            scale[column // config.block, row] = code
        else:
            scale[row, column // config.block] = code


@cute.kernel
def _blocks_kernel(x: cute.Tensor, q: cute.Tensor, scale, given, config: cutlass.Constexpr):
    cute.arch.griddepcontrol_launch_dependents()
    tid, _, _ = cute.arch.thread_idx()
    cta_row, cta_k, _ = cute.arch.block_idx()
    row = cta_row * config.rows + tid // config.threads
    column = cta_k * config.chunk + tid % config.threads * config.width
    k = x.shape[1]
    words = vectors.register_words(config.x, config.width, 1)[None, 0]
    cute.arch.griddepcontrol_wait()
    if row < x.shape[0]:
        address = x.iterator.toint() + (Int64(row) * x.stride[0] + column) * vectors.BYTES[config.x]
        vectors.load(words, address, k - column, config.x, config.aligned)
        amax = vectors.magnitude(words, config.x)
        lanes = cutlass.const_expr(config.block // config.width)
        for i in cutlass.range_constexpr(lanes.bit_length() - 1):
            amax = largest_of(amax, cute.arch.shuffle_sync_bfly(amax, 1 << i))
        wide = vectors.values(words, config.x)
        step = divide_by_constant(from_bits(amax), config.largest)
        code = step
        factor = step
        if cutlass.const_expr(config.format in ("mxfp8", "mxfp4")):
            code = e8m0_code_up(step)
            factor = e8m0_value(code)
            inverse = e8m0_inverse(code)
            for i in cutlass.range_constexpr(config.width):
                wide[i] = multiply(wide[i], inverse)  # exact unless the quotient is subnormal, and rounded alike then
        else:
            if cutlass.const_expr(config.format == "nvfp4"):
                code = e4m3_code(divide_or_zero(step, given[0]))
                factor = e4m3_value(code)
                step = multiply(factor, given[0])
            divide_all(wide, divisor(step, amax, config.x))
        if cutlass.const_expr(config.layout == "values"):
            round_all(wide, config.element, factor)
        elif column % config.block == 0:
            _store_scale(scale, row, column, k, code, config)
        vectors.store(q, row, column, wide, k - column, config.stored, config.aligned)


@cute.kernel
def _tensor_kernel(
    x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, partial, count: Int32, config: cutlass.Constexpr
):
    cute.arch.griddepcontrol_launch_dependents()
    tid, _, _ = cute.arch.thread_idx()
    cta_row, cta_k, _ = cute.arch.block_idx()
    row = cta_row * config.rows + tid // config.threads
    column = cta_k * config.chunk + tid % config.threads * config.width
    k = x.shape[1]
    words = vectors.register_words(config.x, config.width, config.vectors)
    cute.arch.griddepcontrol_wait()
    if row < x.shape[0]:
        address = x.iterator.toint() + (Int64(row) * x.stride[0] + column) * vectors.BYTES[config.x]
        for i in cutlass.range_constexpr(config.vectors):
            ahead = i * config.threads * config.width
            source = address + ahead * vectors.BYTES[config.x]
            vectors.load(words[None, i], source, k - column - ahead, config.x, config.aligned)
        step = Float32(0.0)
        if cutlass.const_expr(partial is None):
            step = scale[0]
        else:
            # every warp by itself: a few loads of a line that is near, and no barrier
            amax = Uint32(0)
            for i in cutlass.range_constexpr(PARTIALS // 32):
                index = tid % 32 + 32 * i
                if index < count:
                    amax = largest_of(amax, bits(partial[index]))
            amax = cute.arch.warp_redux_sync(amax, "umax")
            step = divide_by_constant(from_bits(amax), config.largest)
            if (cta_row == 0) & (cta_k == 0) & (tid == 0):
                scale[0] = step
        by = divisor(step, vectors.magnitude_of_all(words, config.x), config.x)
        for i in cutlass.range_constexpr(config.vectors):
            ahead = i * config.threads * config.width
            wide = vectors.values(words[None, i], config.x)
            divide_all(wide, by)
            if cutlass.const_expr(config.layout == "values"):
                round_all(wide, config.element)
            vectors.store(q, row, column + ahead, wide, k - column - ahead, config.stored, config.aligned)


def _grid(x, q, config: QuantizeConfig, scale=None):
    """Rows first: only that dimension of a grid may exceed 65535."""
    elements = scale.shape[0] * config.tile_k if config.tile_k else q.shape[1] * (2 if config.stored == "e2m1" else 1)
    return (cute.ceil_div(x.shape[0], config.rows), cute.ceil_div(elements, config.chunk), 1)


def _vector(dtype, align=4):
    return make_fake_compact_tensor(dtype, (cute.sym_int(),), assumed_align=align)


def _compile_blocks(config: QuantizeConfig, options: str):
    block = (config.threads * config.rows, 1, 1)
    values = config.layout == "values"
    tile = config.tile_k // config.block
    shape = (cute.sym_int(), cute.sym_int64(), tile) if tile else (cute.sym_int(), cute.sym_int64())
    arguments = {
        "x": vectors.fake_activation(config.x, config.aligned),
        "q": vectors.fake_codes(config.stored),
        "scale": make_fake_compact_tensor(
            Float32 if config.format == "fp8-group" else Uint8, shape, stride_order=tuple(reversed(range(len(shape))))
        ),
        "given": _vector(Float32),
    }

    def start(x, q, scale, given, stream):
        _blocks_kernel(x, q, scale, given, config).launch(
            grid=_grid(x, q, config, scale), block=block, stream=stream, use_pdl=True
        )

    @cute.jit
    def launch(x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, stream):
        start(x, q, scale, None, stream)

    @cute.jit
    def launch_given(x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, given: cute.Tensor, stream):
        start(x, q, scale, given, stream)

    @cute.jit
    def launch_values(x: cute.Tensor, q: cute.Tensor, stream):
        start(x, q, None, None, stream)

    @cute.jit
    def launch_values_given(x: cute.Tensor, q: cute.Tensor, given: cute.Tensor, stream):
        start(x, q, None, given, stream)

    chosen = {
        (False, False): launch,
        (False, True): launch_given,
        (True, False): launch_values,
        (True, True): launch_values_given,
    }[values, config.format == "nvfp4"]
    passed = [arguments[name] for name in config.arguments]
    return cute.compile(chosen, *passed, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)


def _compile_tensor(config: QuantizeConfig, options: str):
    block = (config.threads * config.rows, 1, 1)

    @cute.jit
    def launch(x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, stream):
        _tensor_kernel(x, q, scale, None, Int32(0), config).launch(
            grid=_grid(x, q, config), block=block, stream=stream, use_pdl=True
        )

    @cute.jit
    def launch_amax(x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, partial: cute.Tensor, count: Int32, stream):
        _tensor_kernel(x, q, scale, partial, count, config).launch(
            grid=_grid(x, q, config), block=block, stream=stream, use_pdl=True
        )

    arguments = [vectors.fake_activation(config.x, config.aligned), vectors.fake_codes(config.stored), _vector(Float32)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if config.step == "tensor-amax":
        return cute.compile(launch_amax, *arguments, _vector(Float32), Int32(1), stream, options=options)
    return cute.compile(launch, *arguments, stream, options=options)


def compile(config: QuantizeConfig, options: str = ""):
    """Compile a configuration; what to call stands in `planning.quantize`."""
    options = f"--enable-tvm-ffi {options}"
    if config.step == "blocks":
        return _compile_blocks(config, options)
    if config.step in ("tensor", "tensor-amax"):
        return _compile_tensor(config, options)
    return quantize_rows.compile(config, options)
