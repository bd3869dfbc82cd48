"""Moving operands: bulk copies from global to shared memory, and fragments from shared memory to registers.

Addresses in shared memory are 32-bit integers, addresses in global memory 64-bit integers. Every function is one
instruction, or a few that belong together.
"""

from __future__ import annotations

from cutlass import Float32, Int64, Uint32, cute


def stream_policy():
    """The L2 policy of what is read once: it goes first when room is needed."""
    return cute.arch.inline_ptx("createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64])


def bulk_copy(destination, source, size, barrier, policy=None):
    """Copy contiguous bytes from global to shared memory without the threads; `barrier` counts them as they arrive.

    Args:
        destination: shared memory, a multiple of 16.
        source: global memory, a multiple of 16.
        size: bytes, a multiple of 16.
        barrier: mbarrier in shared memory.
        policy: L2 policy.
    """
    hint, argument = (".L2::cache_hint", ", {$r4}") if policy is not None else ("", "")
    cute.arch.inline_ptx(
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes{hint} "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}]" + argument + ";",
        read_only_args=[destination, source, size, barrier] + ([policy] if policy is not None else []),
    )


def keep_policy():
    """The L2 policy of what will be read soon: it stays while anything else can go."""
    return cute.arch.inline_ptx("createpolicy.fractional.L2::evict_last.b64 {$w0}, 1.0;", write_only_types=[Int64])


def prefetch_l2(source, size, policy):
    """Fetch contiguous bytes of global memory into L2; both multiples of 16."""
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global.L2::cache_hint [{$r0}], {$r1}, {$r2};", read_only_args=[source, size, policy]
    )


def load_shared(address, offset=0):
    """16 bytes: 4 Uint32."""
    return cute.arch.inline_ptx(
        f"ld.shared.v4.b32 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def load_shared_word(address, offset=0):
    """4 bytes: Uint32."""
    return cute.arch.inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}}+{offset}];", write_only_types=[Uint32], read_only_args=[address]
    )


def load_shared_two_words(address, offset=0):
    """8 bytes: 2 Uint32."""
    return cute.arch.inline_ptx(
        f"ld.shared.v2.b32 {{ {{$w0}}, {{$w1}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


def load_shared_half(address, offset=0):
    """2 bytes, as Uint32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; ld.shared.b16 h, [{$r0}+" + f"{offset}" + "]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


def load_shared_pair(address, offset=0):
    """8 bytes: 2 Float32."""
    return cute.arch.inline_ptx(
        f"ld.shared.v2.f32 {{ {{$w0}}, {{$w1}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Float32] * 2,
        read_only_args=[address],
    )


def load_matrices(address, offset=0):
    """Four matrices of 8 rows of 16 bytes: 4 Uint32; lane 8 i + j gives the address of row j of matrix i."""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}+{offset}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def arrive(barrier, chosen):
    """Lanes whose `chosen` is not 0 arrive at a barrier in shared memory."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{$r0}]; }",
        read_only_args=[barrier, chosen],
    )


def arrive_after(barrier, lane, guard, values):
    """Lanes that are number 0 arrive at a barrier once `values` are there.

    The compiler may move an arrival, which it does not know to release shared memory, before instructions that wait for
    loads from there. The values make it depend on those loads.

    Args:
        barrier: mbarrier in shared memory.
        lane: Int32.
        guard: 0, in a way that the compiler cannot know.
        values: Float32 that depend on all that was loaded.
    """
    merge = " ".join(f"or.b32 t, t, {{$r{3 + i}}};" for i in range(1, len(values)))
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 t; mov.b32 t, {$r3}; " + merge + " and.b32 t, t, {$r2}; or.b32 t, t, {$r1}; "
        "setp.eq.u32 p, t, 0; @p mbarrier.arrive.shared::cta.b64 _, [{$r0}]; }",
        read_only_args=[barrier, lane, guard, *values],
    )
