"""The block formats and the schemes made of them: one table of each.

A *format* says how a matrix is stored: the code of an element, and which elements share a scale. A *scheme* pairs
the format of a linear layer's weight with the format of its activation. Both are plain values without a tensor in
them, so engines, tests and kernel planning can compare, print and store them.

Matrices are row major with K, the reduced dimension, last: a weight is (N, K), an activation (M, K).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

ALL = 0
"""In `Format.block`: the block spans the whole dimension."""


class Element(enum.Enum):
    """Code of one element. Definitions: OCP OFP8 (e4m3, e5m2), OCP Microscaling Formats v1.0 (e2m1), IEEE 754."""

    E2M1 = "e2m1"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def bits(self) -> int:
        """Bits that one element takes."""
        return {"e2m1": 4, "e4m3": 8, "e5m2": 8, "bf16": 16, "fp16": 16}[self.value]

    @property
    def largest(self) -> float:
        """Largest finite magnitude."""
        return {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0, "bf16": 3.3895313892515355e38, "fp16": 65504.0}[self.value]


class ScaleType(enum.Enum):
    """Code of one scale. Definitions: IEEE 754 (fp32), OCP OFP8 (e4m3), OCP Microscaling Formats v1.0 (e8m0)."""

    FP32 = "fp32"
    E4M3 = "e4m3"
    E8M0 = "e8m0"

    @property
    def bits(self) -> int:
        """Bits that one scale takes."""
        return {"fp32": 32, "e4m3": 8, "e8m0": 8}[self.value]


@dataclass(frozen=True)
class Format:
    """How a matrix is stored.

    Attributes:
        name: the name used in scheme strings, tables and messages.
        element: code of one element. Two e2m1 elements share a byte, the low nibble holding the even k.
        scale: code of a scale, None for an unscaled format.
        block: (rows, columns) that share a scale; `ALL` spans the dimension. Blocks at the edge may be smaller.
        global_scale: whether an fp32 scale multiplies all block scales. One for the matrix, or one a row.
    """

    name: str
    element: Element
    scale: ScaleType | None = None
    block: tuple[int, int] | None = None
    global_scale: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the format stores less than 16 bits an element."""
        return self.element.bits < 16

    @property
    def packed(self) -> int:
        """Elements that share one byte of storage, at least 1."""
        return max(1, 8 // self.element.bits)

    @property
    def k_multiple(self) -> int:
        """What K must be a multiple of. 1 where blocks at the edge may be smaller."""
        return self.block[1] if self.block is not None and self.block[1] in (16, 32) else 1

    def scale_shape(self, rows: int, k: int) -> tuple[int, ...]:
        """Shape of the plain row-major scales of a (rows, k) matrix, () for an unscaled format."""
        if self.block is None:
            return ()
        block_rows, block_k = (size or whole for size, whole in zip(self.block, (max(rows, 1), max(k, 1)), strict=True))
        counts = (-(-rows // block_rows), -(-k // block_k))
        if self.block == (ALL, ALL):
            return (1,)
        return counts[:1] if self.block[1] == ALL else counts

    def nbytes(self, rows: int, k: int) -> int:
        """Bytes of elements and block scales of a (rows, k) matrix."""
        elements = rows * k * self.element.bits // 8
        if self.scale is None:
            return elements
        count = 1
        for size in self.scale_shape(rows, k):
            count *= size
        return elements + count * self.scale.bits // 8

    def __str__(self) -> str:
        return self.name


BF16 = Format("bf16", Element.BF16)
FP16 = Format("fp16", Element.FP16)
FP8_TENSOR = Format("fp8-tensor", Element.E4M3, ScaleType.FP32, (ALL, ALL))
FP8_ROW = Format("fp8-row", Element.E4M3, ScaleType.FP32, (1, ALL))
FP8_BLOCK = Format("fp8-block", Element.E4M3, ScaleType.FP32, (128, 128))
FP8_GROUP = Format("fp8-group", Element.E4M3, ScaleType.FP32, (1, 128))
MXFP8 = Format("mxfp8", Element.E4M3, ScaleType.E8M0, (1, 32))
MXFP4 = Format("mxfp4", Element.E2M1, ScaleType.E8M0, (1, 32))
NVFP4 = Format("nvfp4", Element.E2M1, ScaleType.E4M3, (1, 16), global_scale=True)

FORMATS: tuple[Format, ...] = (BF16, FP16, FP8_TENSOR, FP8_ROW, FP8_BLOCK, FP8_GROUP, MXFP8, MXFP4, NVFP4)
"""Every format. `FP8_ROW` is a scale per output channel of a weight and per token of an activation."""


@dataclass(frozen=True)
class Scheme:
    """A weight format with an activation format. Only the pairs of `SCHEMES` exist.

    `activation=BF16` beside a quantized weight stands for unquantized 16-bit activations, bf16 or fp16 as they come.

    Raises:
        ArgumentError: the pair is not in `SCHEMES`.
    """

    weight: Format
    activation: Format
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        from b12x_core.errors import ArgumentError

        activation = BF16 if self.weight.quantized and self.activation == FP16 else self.activation
        object.__setattr__(self, "activation", activation)
        name = _NAMES.get((self.weight, activation))
        if name is None:
            raise ArgumentError(
                f"Scheme: expected a pair of weight and activation formats out of {', '.join(_PAIRS)}; "
                f"got weight {self.weight} with activation {self.activation}"
            )
        object.__setattr__(self, "name", name)

    @staticmethod
    def parse(name: str) -> Scheme:
        """The scheme of a name such as "nvfp4-w4a4".

        Raises:
            ArgumentError: no scheme has that name.
        """
        from b12x_core.errors import ArgumentError

        scheme = SCHEMES.get(name)
        if scheme is None:
            raise ArgumentError(f"Scheme.parse: expected one of {', '.join(SCHEMES)}; got {name!r}")
        return scheme

    @property
    def static_activation_scale(self) -> bool | None:
        """True: an input scale is required; None: it may be given (else dynamic); False: there is none."""
        if self.activation == NVFP4:
            return True
        return None if self.activation == FP8_TENSOR else False

    @property
    def weight_only(self) -> bool:
        """Whether activations stay in 16 bits beside a quantized weight."""
        return self.weight.quantized and not self.activation.quantized

    def with_16_bit_activations(self) -> Scheme:
        """The same weight with unquantized activations, for `B12X_FORCE_A16=1`."""
        return self if not self.weight.quantized else Scheme(self.weight, BF16)

    def __str__(self) -> str:
        return self.name


_PAIRS: dict[str, tuple[Format, Format]] = {
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    "fp8-tensor": (FP8_TENSOR, FP8_TENSOR),
    "fp8-tensor-token": (FP8_TENSOR, FP8_ROW),
    "fp8-channel": (FP8_ROW, FP8_ROW),
    "fp8-channel-tensor": (FP8_ROW, FP8_TENSOR),
    "fp8-block": (FP8_BLOCK, FP8_GROUP),
    "fp8-tensor-w8a16": (FP8_TENSOR, BF16),
    "fp8-channel-w8a16": (FP8_ROW, BF16),
    "fp8-block-w8a16": (FP8_BLOCK, BF16),
    "mxfp8": (MXFP8, MXFP8),
    "mxfp8-w8a16": (MXFP8, BF16),
    "nvfp4-w4a4": (NVFP4, NVFP4),
    "nvfp4-w4a8": (NVFP4, MXFP8),
    "nvfp4-w4a8-fp8": (NVFP4, FP8_ROW),
    "nvfp4-w4a16": (NVFP4, BF16),
    "mxfp4-w4a4": (MXFP4, MXFP4),
    "mxfp4-w4a8": (MXFP4, MXFP8),
    "mxfp4-w4a8-fp8": (MXFP4, FP8_ROW),
    "mxfp4-w4a16": (MXFP4, BF16),
}
_NAMES: dict[tuple[Format, Format], str] = {pair: name for name, pair in _PAIRS.items()}

SCHEMES: dict[str, Scheme] = {name: Scheme(*pair) for name, pair in _PAIRS.items()}
"""Every scheme by its name."""
