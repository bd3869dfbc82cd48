"""Configurations of the quantization kernels. Which of them quantize a problem stands in `planning.quantize_plan`."""

from __future__ import annotations

from dataclasses import dataclass

PARTIALS = 256
"""Elements of the float32 scratch of the dynamic fp8-tensor format."""

FORMATS = ("fp8-tensor", "fp8-row", "fp8-group", "mxfp8", "mxfp4", "nvfp4")
"""Formats of activations."""

LAYOUTS = ("row", "k-major", "tiles64", "tiles128", "values")
"""What is written, see `QuantizeConfig.layout`."""

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
        layout: what is written. "row": codes, and block scales row-major. "k-major": codes, and block scales by blocks
            first; fp8-group only. "tiles64", "tiles128": codes, and block scales by tiles of that many elements of K,
            as block-scaled matrix instructions take them; mxfp8, mxfp4 and nvfp4 only. "values": no codes and no block
            scales but what they stand for, the code times its block's scale, which bf16 holds exactly; scales of rows,
            of the tensor and of nvfp4 globally stay apart.
        parts: "row" only, with rows that are resident: CTAs of a row, a divisor of `vectors`. Each reads the whole row
            for its largest magnitude, and quantizes one of so many parts.
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
    parts: int = 1

    @property
    def name(self) -> str:
        """A unique name, safe in file names."""
        return (
            f"{self.format}-{self.step}-{self.x}{'' if self.aligned else '-unaligned'}"
            f"-{self.threads}x{self.rows}v{self.vectors}{'' if self.resident else '-twice'}"
            f"{'' if self.parts == 1 else f'-p{self.parts}'}"
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
    def stored(self) -> str:
        """Code of what is stored for an element."""
        return "bf16" if self.layout == "values" else self.element

    @property
    def tile_k(self) -> int:
        """Elements of K whose block scales of a row lie together; 0 in other layouts."""
        return int(self.layout.removeprefix("tiles")) if self.layout.startswith("tiles") else 0

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
        q         (M, B) uint8, contiguous, B a multiple of 16 and at least the bytes of a row; the rest becomes 0;
                  "values": (M, B) bf16 and B a multiple of 8
        scale     "blocks": float32, or uint8 holding e4m3 or e8m0: (M, blocks); k-major: (blocks, ldm >= M); tiles:
                  (tiles, ldm >= M, blocks of a tile), 0 for blocks beyond K; none for "values".
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
        scale = () if self.step == "blocks" and self.layout == "values" else ("scale",)
        return ("x", "q", *scale, *(("given",) if self.format == "nvfp4" else ()))
