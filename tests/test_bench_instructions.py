"""What callgrind counted, by library."""

from __future__ import annotations

from bench.instructions import by_library

CALLGRIND = """\
events: Ir
ob=(1) /usr/lib/libpython.so
fl=(1) ceval.c
fn=(1) eval
10 500
+3 25
cob=(2) /usr/lib/libsqlite3.so
cfn=(2) step
calls=3 40
11 9000
* 5
ob=(2)
fn=(2)
40 8000
-2 1000
totals: 9530
"""


def test_what_a_call_costs_counts_for_the_library_that_spends_it() -> None:
    assert by_library(CALLGRIND) == {"libpython.so": 530, "libsqlite3.so": 9000}
