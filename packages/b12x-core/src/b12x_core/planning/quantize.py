"""Configurations of the quantization kernels, and which of them quantize a problem."""

from __future__ import annotations

from dataclasses import dataclass

PARTIALS = 256
"""Elements of the float32 scratch of the dynamic fp8-tensor format."""

FORMATS = ("fp8-tensor", "fp8-row", "fp8-group", "mxfp8", "mxfp4", "nvfp4")
"""Formats of activations."""

MAX_THREADS = 1024
"""Threads that a CTA may have."""

_BLOCKS = {"fp8-group": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class QuantizeConfig:
    """Everything about a quantization kernel that is fixed when it is compiled.

    Attributes:
        step: what the launch does. "blocks": scales of blocks along K, and the codes. "row": a scale for each row, and
            the codes. "tensor": the codes, with a given scale. "amax": largest magnitudes of parts of x.
            "tensor-amax": the scale out of those, and the codes.
        format: name of the format.
        x: "bf16", "fp16" or "fp32".
        aligned: whether every row of x starts at a multiple of 16 bytes and K is a multiple of 8.
        threads: threads along a row, a multiple of 32; at most 1024.
        rows: rows of a CTA; 1 for "row".
        vectors: vectors (see `width`) that a thread holds at a time; 1 for "blocks".
        resident: "row" only: a row fits into the registers of its threads; else it is read twice.
        layout: of block scales. "row": row-major (M, blocks); "k-major": (blocks, M or more), fp8-group only.
    """

    step: str
    format: str
    x: str
    aligned: bool
    threads: int
    rows: int = 1
    vectors: int = 1
    resident: bool = True
    layout: str = "row"

    @property
    def name(self) -> str:
        """A unique name, safe in file names."""
        return (
            f"{self.format}-{self.step}-{self.x}{'' if self.aligned else '-unaligned'}"
            f"-{self.threads}x{self.rows}v{self.vectors}{'' if self.resident else '-twice'}"
            f"{'' if self.layout == 'row' else '-' + self.layout}"
        )

    @property
    def element(self) -> str:
        """Code of an element."""
        return "e2m1" if self.format in ("mxfp4", "nvfp4") else "e4m3"

    @property
    def largest(self) -> float:
        """Largest magnitude of an element."""
        return 6.0 if self.element == "e2m1" else 448.0

    @property
    def block(self) -> int:
        """Elements of K that share a scale, of a format with blocks along K."""
        return _BLOCKS[self.format]

    @property
    def width(self) -> int:
        """Elements of a vector, which are consecutive and belong to one thread."""
        return 16 if self.step == "blocks" else 8

    @property
    def chunk(self) -> int:
        """Elements of K that the threads of a row handle at a time."""
        return self.threads * self.vectors * self.width

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the kernel's `launch` takes, by position.

        ========  ==============================================================================================
        x         (M, K) bf16, fp16 or fp32, as configured; rows of any stride
        q         (M, B) uint8, contiguous, B a multiple of 16 and at least the bytes of a row; the rest becomes 0
        scale     "blocks": (M, blocks) or, k-major, (blocks, ldm >= M), float32 or uint8 holding e4m3 or e8m0;
                  "row": (M,) float32; "tensor", "tensor-amax": (1,) float32, read by the former
        given     (1,) float32, the global scale of nvfp4
        partial   (`PARTIALS`,) float32, any contents; passed from "amax" to "tensor-amax"
        ctas      int, `QuantizeLaunch.ctas`
        ========  ==============================================================================================
        """
        if self.step == "amax":
            return ("x", "partial", "ctas")
        if self.step == "tensor-amax":
            return ("x", "q", "scale", "partial", "ctas")
        return ("x", "q", "scale", "given") if self.format == "nvfp4" else ("x", "q", "scale")


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


def _row(x: str, aligned: bool, k: int) -> QuantizeConfig:
    """One CTA for a row. What a thread holds hides the latency of memory; too many threads leave no second CTA."""
    vectors = _ceil(k, 8)
    held = next((v for v in (1, 2, 4, 9) if vectors <= v * (256 if v > 2 else 320)), 9)
    threads = _threads(vectors, held, MAX_THREADS)
    if vectors > held * 512:
        return QuantizeConfig("row", "fp8-row", x, aligned, 512, 1, 4, resident=False)
    return QuantizeConfig("row", "fp8-row", x, aligned, threads, 1, held)


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
        layout: of the scales of fp8-group: "row" or "k-major".
        static: whether the scale of fp8-tensor is given.
    """
    if form == "fp8-row" or (form == "fp8-tensor" and not static and m == 1):
        return [QuantizeLaunch(_row(x, aligned, k))]  # one row is one tensor
    if form != "fp8-tensor":
        return [QuantizeLaunch(_elementwise("blocks", form, x, aligned, m, k, multiprocessors, layout))]
    if static:
        return [QuantizeLaunch(_elementwise("tensor", form, x, aligned, m, k, multiprocessors, "row"))]
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
        QuantizeLaunch(_elementwise("tensor-amax", form, x, aligned, m, k, multiprocessors, "row"), ctas),
    ]
