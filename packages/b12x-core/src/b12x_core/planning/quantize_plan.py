"""Which quantization kernels quantize a problem."""

from __future__ import annotations

from dataclasses import dataclass

from b12x_core.planning.quantize import PARTIALS, QuantizeConfig

MAX_THREADS = 1024
"""Threads that a CTA may have."""

_LAYOUTS = {
    "fp8-tensor": ("row",),
    "fp8-row": ("row", "values"),
    "fp8-group": ("row", "k-major"),
    "mxfp8": ("row", "tiles64", "tiles128", "values"),
    "mxfp4": ("row", "tiles128", "values"),
    "nvfp4": ("row", "tiles128", "values"),
}


def layouts(form: str) -> tuple[str, ...]:
    """The layouts that matrix kernels read an activation of a format in, and the row-major one."""
    return _LAYOUTS[form]


@dataclass(frozen=True)
class QuantizeLaunch:
    """A kernel, and the one number that its launch takes.

    Attributes:
        config: which kernel.
        ctas: how many parts x was cut into; 0 where `config.arguments` has no "ctas".
    """

    config: QuantizeConfig
    ctas: int = 0


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _threads(vectors: int, held: int, limit: int) -> int:
    """Threads along a row of so many vectors: full warps, equal chunks, none larger than `limit` threads."""
    chunks = _ceil(vectors, held * limit)
    return 32 * _ceil(vectors, 32 * held * chunks)


def _elementwise(
    step: str, form: str, x: str, aligned: bool, m: int, k: int, count: int, layout: str
) -> QuantizeConfig:
    """A kernel whose CTAs share nothing.

    Few tokens: many small CTAs, as the time is that of one thread's chain of instructions. Many: CTAs that handle
    enough elements to keep up with memory, since a GPU starts one in about 1 ns.
    """
    vectors = _ceil(k, 16 if step == "blocks" else 8)
    small = m * _ceil(vectors, 128) <= 8 * count
    held = 1 if small or step == "blocks" or vectors < 64 else 4 if vectors > 512 and m * vectors > 1 << 20 else 2
    threads = _threads(vectors, held, 256)
    rows = max(1, 256 // threads)
    if small:
        threads, rows = 64 if step == "blocks" or vectors <= 64 else 128, 1
    return QuantizeConfig(step, form, x, aligned, threads, rows, held, layout=layout)


def _row(x: str, aligned: bool, m: int, k: int, count: int, layout: str) -> QuantizeConfig:
    """One CTA for a row. What a thread holds hides the latency of memory; too many threads leave no second CTA.

    Long rows, if few: several CTAs for a row, since dividing takes longer than reading; but not so many that they crowd
    out the next kernel's blocks, which arrive early.
    """
    vectors = _ceil(k, 8)
    held = next((v for v in (1, 2, 4, 9) if vectors <= v * (256 if v > 2 else 320)), 9)
    threads = _threads(vectors, held, MAX_THREADS)
    if vectors > held * 512:
        return QuantizeConfig("row", "fp8-row", x, aligned, 512, 1, 4, resident=False, layout=layout)
    parts = held if held >= 4 and 5 * m * held <= 3 * count else 1
    return QuantizeConfig("row", "fp8-row", x, aligned, threads, 1, held, layout=layout, parts=parts)


def plan_quantize(
    form: str,
    x: str,
    m: int,
    k: int,
    multiprocessors: int,
    *,
    aligned: bool = True,
    layout: str = "row",
    static: bool = False,
) -> list[QuantizeLaunch]:
    """The launches that quantize x (m, k), in order. Nothing is to be launched for m = 0 or k = 0.

    Args:
        form: one of `FORMATS`.
        x: "bf16", "fp16" or "fp32".
        multiprocessors: of the GPU.
        aligned: whether every row of x starts at a multiple of 16 bytes and k is a multiple of 8.
        layout: one of `layouts(form)`.
        static: whether the scale of fp8-tensor is given.
    """
    if form == "fp8-row" or (form == "fp8-tensor" and not static and m == 1):
        return [QuantizeLaunch(_row(x, aligned, m, k, multiprocessors, layout))]  # one row is one tensor
    if form != "fp8-tensor":
        return [QuantizeLaunch(_elementwise("blocks", form, x, aligned, m, k, multiprocessors, layout))]
    if static:
        return [QuantizeLaunch(_elementwise("tensor", form, x, aligned, m, k, multiprocessors, layout))]
    vectors = _ceil(k, 8)
    small = m * vectors <= PARTIALS * MAX_THREADS
    held = 2 if small and vectors <= 640 else 4
    threads = _threads(vectors, held, 320)
    rows = 1 if small and m * _ceil(vectors, threads * held) <= PARTIALS else MAX_THREADS // threads
    amax = QuantizeConfig("amax", form, x, aligned, threads, rows, held)
    parts = _ceil(m, rows) * _ceil(k, amax.chunk)
    waves = max(1, PARTIALS // multiprocessors)
    ctas = min(parts, PARTIALS, multiprocessors * (waves if threads * rows <= MAX_THREADS // 2 else 1))
    return [
        QuantizeLaunch(amax, ctas),
        QuantizeLaunch(_elementwise("tensor-amax", form, x, aligned, m, k, multiprocessors, layout), ctas),
    ]
