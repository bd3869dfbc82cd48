"""Matrices to and from shared memory, and accesses of 256 bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from b12x_conformance.emulation import definitions as d
from b12x_conformance.emulation.definitions import Words
from b12x_conformance.emulation.probe import Check, Probe, equal


def _slots(data: Words) -> np.ndarray:
    """(trials, 32): the 16-byte slot of shared memory that each lane addresses, a permutation."""
    return (data[..., 4].astype(np.int64) * 5 + 3) % 32


def _matrix_data(rng: np.random.Generator) -> Words:
    """Four words of memory a lane, what its address comes from, its number."""
    words = rng.integers(0, 2**32, (8, 32, 6), dtype=np.uint32)
    words[..., 4] = (np.arange(32) + np.arange(8)[:, None]) % 32
    words[..., 5] = np.arange(32)
    return words


def _rows(data: Words) -> np.ndarray:
    """(trials, 32, 16): the bytes that each lane addresses."""
    memory = np.ascontiguousarray(data[..., :4]).view(np.uint8)
    return np.take_along_axis(memory, _slots(data)[..., None], axis=1)


_MEMORY = (
    ".shared .align 16 .b8 b12x_buffer[1024]; .reg .b32 base, own, slot, at; .reg .b64 wide; "
    "mov.u32 base, b12x_buffer; shl.b32 own, {$r5}, 4; add.u32 own, own, base; mul.lo.u32 slot, {$r4}, 5; "
    "add.u32 slot, slot, 3; and.b32 slot, slot, 31; shl.b32 slot, slot, 4; add.u32 at, slot, base; bar.warp.sync -1; "
)
"""Shared memory; `own`: the slot of the lane, `at`: the slot that it addresses."""
_FILL = "st.shared.v4.b32 [own], { {$r0}, {$r1}, {$r2}, {$r3} }; bar.warp.sync -1; "


def probes() -> Iterator[Probe]:
    """All of them."""
    for registers in (1, 2, 4):
        snippets: list[tuple[str, Check]] = []
        into = "{ " + ", ".join(f"{{$w{i}}}" for i in range(registers)) + " }"
        for width, source in ((4, "b8x16.b4x16_p64"), (6, "b8x16.b6x16_p32")):
            opcode = f"ldmatrix.sync.aligned.m8n16.x{registers}.shared.{source}"
            text = f"{{ {_MEMORY} {_FILL} {opcode} {into}, [at]; }}"
            snippets.append((text, lambda x, y, n=registers, w=width: equal(y, d.load_m8n16(_rows(x), n, w))))
        for width, source in ((4, "b8x16.b4x16_p64"), (6, "b8x16.b6x16_p32"), (8, "b8")):
            if registers == 1:
                continue
            # a generic address, and an offset
            opcode = f"ldmatrix.sync.aligned.m16n16.x{registers // 2}.trans.{source}"
            generic = "cvt.u64.u32 wide, at; cvta.shared.u64 wide, wide; sub.u64 wide, wide, 16;"
            text = f"{{ {_MEMORY} {_FILL} {generic} {opcode} {into}, [wide+16]; }}"
            snippets.append((text, lambda x, y, n=registers // 2, w=width: equal(y, d.load_m16n16(_rows(x), n, w))))
        yield Probe(f"ldmatrix-{registers}-registers", tuple(snippets), _matrix_data, registers)

    def stored(data: Words, results: Words, number: int) -> str:
        rows = d.store_m16n8(data[..., :number], number)
        memory = np.zeros_like(rows)
        np.put_along_axis(memory, _slots(data)[..., None], rows, axis=1)
        return equal(results, memory.view(np.uint32))

    snippets = []
    for number in (1, 2, 4):
        registers_of = "{ " + ", ".join(f"{{$r{i}}}" for i in range(number)) + " }"
        text = (
            f"{{ {_MEMORY} st.shared.v4.b32 [own], {{0, 0, 0, 0}}; bar.warp.sync -1; "
            f"stmatrix.sync.aligned.m16n8.x{number}.trans.shared.b8 [at], {registers_of}; bar.warp.sync -1; "
            "ld.shared.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [own]; }"
        )
        snippets.append((text, lambda x, y, n=number: stored(x, y, n)))
    yield Probe("stmatrix", tuple(snippets), _matrix_data, 4)
    yield _wide_probe()


def _wide_probe() -> Probe:
    """Loads and stores of 256 bits, some of whose results overwrite the address."""

    def copied(data: Words, results: Words) -> str:
        return equal(results, data)

    words = ", ".join(f"{{$w{i}}}" for i in range(8))
    sources = ", ".join(f"{{$r{i}}}" for i in range(8))
    split = " ".join(f"mov.b64 {{ {{$w{2 * i}}}, {{$w{2 * i + 1}}} }}, v{i};" for i in range(4))
    wide = f"mov.b64 v0, {{$r8}}; ld.global.nc.L1::no_allocate.L2::evict_first.v4.b64 {{v0, v1, v2, v3}}, [v0]; {split}"
    snippets = (
        f"ld.global.v8.b32 {{ {words} }}, [{{$r8}}];",
        f"{{ .reg .b64 v<4>; {wide} }}",
        f"{{ .reg .b64 v<4>; {wide} st.global.L2::evict_last.v4.u64 [{{$r9}}], {{v0, v1, v2, v3}}; }}",
        f"{{ st.global.v8.f32 [{{$r9}}], {{ {sources} }}; ld.global.v8.u32 {{ {words} }}, [{{$r9}}]; }}",
    )

    def data(rng: np.random.Generator) -> Words:
        return rng.integers(0, 2**32, (8, 32, 8), dtype=np.uint32)

    return Probe("256-bit-access", tuple((snippet, copied) for snippet in snippets), data, 8, addresses=True)
