"""The schedule parser on a literal dump: loops, alternatives, waiting cycles."""

from __future__ import annotations

import pytest

from benchmarks.static_schedule import parse
from benchmarks.tpu_static import refusal

BUNDLES = """= control target key end
     0   :  { %s1 = smov.u32 1 }
   0x1 LB: > { %s2 = sadd.s32 1, %s2 }
   0x2   : > { %9 = sbr.rel (%p1) target bundleno = 12 (0xc), region = 5 }
   0x3   : > {}
   0x4   : > {}
   0x5   : > {}
   0x6   : > {}
   0x7   : > { %a = dma.hbm_to_vmem %x } ;; { %b = dma.hbm_to_vmem %y }
   0x8   : > { %s2 = sadd.s32 1, %s2 }
   0x9 PF: > { %a = dma.hbm_to_vmem %x } ;; { %b = dma.hbm_to_vmem %y }
   0xa LB: >> { %d = dma.done.wait %q }
   0xb   : >> { %e = vmatmul %q }
   0xc PF: > { %v = vmatmul %q }
   0xd   : > { %9 = sbr.rel (!%p1) target bundleno = 1 (0x1), region = 6 }
   0xe   : > {}
   0xf   : > {}
  0x10   : > {}
  0x11   : > {}
  0x12   :  { %s1 = smov.u32 1 }
"""
UTILIZATION = """== CAPACTIY:
MATMUL, SALU
    4     2
== UTILIZATION:
0 1
0 1
0 1
0 0
0 0
0 0
0 0
0 2
0 1
0 2
0 0
2 0
1 0
0 1
0 0
0 0
0 0
0 0
0 1
"""


def test_a_loop_counts_its_own_cycles_and_the_longest_of_alternative_page_issues() -> None:
    schedule = parse(BUNDLES, UTILIZATION)
    (outer,) = schedule.loops(1)
    # 6 up to the branch's delay slots, 2 that issue pages (not the other's 1), 6 at the end.
    assert outer.cycles == 6 + 2 + 6
    assert outer.issue_cycles == 2
    assert outer.empty == 8
    (inner,) = schedule.loops(2)
    assert (inner.cycles, inner.used["MATMUL"]) == (2, 2)
    assert schedule.hottest() == inner
    assert schedule.capacity == {"MATMUL": 4, "SALU": 2}


def test_starting_an_items_inputs_is_no_page_issue() -> None:
    with_table = BUNDLES.replace("%b = dma.hbm_to_vmem %y", "%b = dma.hbm_to_smem %y", 1)
    (outer,) = parse(with_table, UTILIZATION).loops(1)
    assert outer.cycles == 6 + 2 + 1 + 6
    assert outer.issue_cycles == 1  # the other block alone


def test_files_of_different_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="19 bundles but 18 rows"):
        parse(BUNDLES, UTILIZATION.rstrip("\n").rsplit("\n", 1)[0])


def test_a_refusal_is_the_last_error_that_a_failed_run_names() -> None:
    output = "x failed:\nTraceback\n    raise ValueError(\nValueError: 6 heads: no\n-----\nbye\n"
    assert refusal(output) == "ValueError: 6 heads: no"
    assert refusal("killed") == "killed"
