"""Finding the loop that multiplies in machine code, and counting what it issues."""

from __future__ import annotations

import math

import pytest
from b12x_core.tools.arrivals import early_arrivals
from b12x_core.tools.main_loop import main_loop
from b12x_core.tools.report import occupancy

HEAD = "\t.text\nkernel:\n.text.kernel:\n"

NESTED = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R60, [R21+0x1000] ;
        /*0020*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R12, R4, R16, R17, URZ ;
        /*0040*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R12, R4, R16, R17, URZ ;
        /*0050*/                   LDSM.16.M88.4 R60, [R21+0x1000] ;
        /*0060*/                   LDS.128 R60, [R21+0x1000] ;
        /*0070*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R122+URZ+0x18], RZ ;
        /*0080*/                   BRA.DIV UR4, `(.L_x_8) ;
.L_x_2:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R120+URZ], R101 ;
        /*00a0*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*00b0*/                   IADD3 R4, PT, PT, R113, 0x420, R109 ;
        /*00c0*/                   UIADD3 UR4, UPT, UPT, UR4, 0x2, URZ ;
        /*00d0*/                   IMAD.MOV.U32 R4, RZ, RZ, R5 ;
        /*00e0*/                   BRA.U !UP0, `(.L_x_1) ;
        /*00f0*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R12, R4, R16, R17, URZ ;
        /*0100*/                   BRA `(.L_x_0) ;
.L_x_9:
        /*0110*/                   EXIT ;
.L_x_8:
        /*0120*/                   WARPSYNC.COLLECTIVE R4, `(.L_x_7) ;
.L_x_7:
        /*0130*/                   BRA `(.L_x_3) ;
"""


def test_the_innermost_loop_that_multiplies_is_counted_without_what_waits_or_parts() -> None:
    loop = main_loop(HEAD + NESTED)
    assert loop is not None
    assert loop.matrix == {"QMMA.SF.16832.F32.E4M3.E4M3.E8": 2}
    expected = {"matrix": 2, "ldmatrix": 1, "shared": 1, "synchronization": 1, "integer": 1, "uniform": 1, "other": 3}
    assert {kind: count for kind, count in loop.counts.items() if count} == expected
    assert loop.arrivals == 1
    assert loop.issue_bound == 32 / 10
    assert loop.shared_bound == 32 / (4 * 1024 / 128)
    assert loop.per_matrix["other"] == 1.5


def test_code_that_does_not_multiply_in_a_loop() -> None:
    assert main_loop(HEAD + NESTED.replace("QMMA", "FFMA")) is None
    straight = (
        "        /*0000*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;\n        /*0010*/    EXIT ;\n"
    )
    assert main_loop(HEAD + straight) is None


def test_without_loads_shared_memory_limits_nothing() -> None:
    loop = main_loop(HEAD + NESTED.replace("LDSM.16.M88.4", "MOV").replace("LDS.128", "MOV"))
    assert loop is not None
    assert loop.shared_bound == math.inf


def test_occupancy_of_a_multiprocessor() -> None:
    assert occupancy(288, 128, 100_000) == 1  # shared memory
    assert occupancy(256, 128, 1000) == 2  # registers
    assert occupancy(160, 40, 48_000) == 2
    assert occupancy(32, 32, 0) == 24  # blocks


RING = """
.L_x_1:
        /*0000*/                   LDSM.16.M88.4 R60, [R21+0x1000] ;
        /*0010*/                   LDS.128 R8, [R21] ;
        /*0020*/                   {first} ;
        /*0030*/                   {second} ;
        /*0040*/                   BRA.U !UP0, `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""
MMA = "QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R62, R4, R16, R17, URZ"
ARRIVE = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R122+URZ+0x18], RZ"


@pytest.mark.parametrize(
    ("code", "lag", "loads"),
    [
        ({"first": MMA, "second": ARRIVE}, 0, []),
        ({"first": ARRIVE, "second": MMA}, 0, ["LDSM.16.M88.4 R60, [R21+0x1000]", "LDS.128 R8, [R21]"]),
        ({"first": ARRIVE, "second": MMA}, 1, []),
        ({"first": MMA.replace("R8", "R12"), "second": ARRIVE}, 0, ["LDS.128 R8, [R21]"]),
    ],
)
def test_an_arrival_must_not_overtake_loads(code: dict[str, str], lag: int, loads: list[str]) -> None:
    loop = main_loop(HEAD + RING.format(**code))
    assert loop is not None
    assert early_arrivals(loop, lag) == loads
