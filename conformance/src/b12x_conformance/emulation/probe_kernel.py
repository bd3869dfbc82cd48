"""A kernel of one warp a block that runs given PTX on given registers. Needs the CuTe DSL."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass

import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@dataclass(frozen=True, repr=False)
class _Program:
    """PTX of each snippet, and which sources it takes; `{$r<i>}` counts those from 0."""

    texts: tuple[str, ...]
    sources: tuple[tuple[int, ...], ...]
    n_in: int
    n_out: int
    addresses: bool

    def __repr__(self) -> str:  # goes into the name of the kernel
        return "probe"

    @classmethod
    def of(cls, snippets: tuple[str, ...], n_in: int, n_out: int, addresses: bool) -> _Program:
        # `inline_ptx` numbers the sources that the text names, not those that it is given, so others must not be given.
        sources = tuple(tuple(sorted({int(i) for i in re.findall(r"\{\$r(\d+)\}", s)})) for s in snippets)
        texts = tuple(
            re.sub(r"\{\$r(\d+)\}", lambda m, used=used: f"{{$r{used.index(int(m[1]))}}}", s)
            for s, used in zip(snippets, sources, strict=True)
        )
        return cls(texts, sources, n_in, n_out, addresses)


@cute.kernel
def _kernel(inputs: cute.Tensor, outputs: cute.Tensor, program: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    trial, _, _ = cute.arch.block_idx()
    words = [inputs[trial, lane, i] for i in range(program.n_in)]
    for s in cutlass.range_constexpr(len(program.texts)):
        given = words
        if cutlass.const_expr(program.addresses):
            given = [*words, inputs[trial, lane, None].iterator.toint(), outputs[trial, s, lane, None].iterator.toint()]
        results = cute.arch.inline_ptx(
            program.texts[s],
            write_only_types=[Uint32] * program.n_out,
            read_only_args=[given[i] for i in program.sources[s]],
        )
        if cutlass.const_expr(program.n_out == 1):
            outputs[trial, s, lane, 0] = results
        else:
            for i in cutlass.range_constexpr(program.n_out):
                outputs[trial, s, lane, i] = results[i]


@cute.jit
def _launch(inputs: cute.Tensor, outputs: cute.Tensor, trials: Int32, stream, program: cutlass.Constexpr):
    _kernel(inputs, outputs, program).launch(grid=(trials, 1, 1), block=(32, 1, 1), stream=stream)


def compile(snippets: tuple[str, ...], n_in: int, n_out: int, addresses: bool = False):
    """Compile for the architecture that CUTE_DSL_ARCH names.

    Args:
        snippets: PTX with `{$r0}` to `{$r<n_in - 1>}` for 32-bit sources and `{$w0}` ... for 32-bit destinations, each
            of which must be named.
        n_in, n_out: how many of them.
        addresses: whether snippets also take, as `{$r<n_in>}` and `{$r<n_in + 1>}`, the 64-bit addresses of the lane's
            inputs and of its results.

    Returns:
        The compiled function of inputs uint32 (trials, 32, n_in), outputs uint32 (trials, snippets, 32, n_out) and the
        number of trials.
    """
    trials = cute.sym_int()
    inputs = make_fake_compact_tensor(Uint32, (trials, 32, n_in), stride_order=(2, 1, 0))
    outputs = make_fake_compact_tensor(Uint32, (trials, len(snippets), 32, n_out), stride_order=(3, 2, 1, 0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    program = _Program.of(snippets, n_in, n_out, addresses)
    # The compiler also writes the PTX into a file, by default in the current folder.
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --keep-ptx --dump-dir {folder}"
        return cute.compile(_launch, inputs, outputs, Int32(1), stream, program, options=options)
