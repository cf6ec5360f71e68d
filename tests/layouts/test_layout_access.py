"""Coverage, alignment, sectors and banks: against hand-counted cases, built kernels and measured
counters."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import cutlass.cute as cute
import measure_access
import pytest

from layouts import Layout, access, operations, parse

ROOT = Path(__file__).resolve().parents[2]
COUNTERS = ROOT / "docs/layouts/access.json"
ROW = parse("((32,4),8):((32,1),4)")


def lanes(step: int, width: int = 4) -> list[int]:
    return [i * step * width for i in range(32)]


@pytest.mark.parametrize(
    ("addresses", "width", "sectors", "lines"),
    [
        (lanes(1), 4, 4, 1),
        (lanes(2), 4, 8, 2),
        (lanes(8), 4, 32, 8),
        ([4 + a for a in lanes(1)], 4, 5, 2),
        (lanes(1, 16), 16, 16, 4),
        (lanes(2, 16), 16, 32, 8),
        ([64] * 32, 16, 1, 1),
        ([0, None, 4, None], 4, 1, 1),
    ],
)
def test_global_requests(addresses, width, sectors, lines):
    request = access.global_request(addresses, width)
    assert (request.sectors, request.lines) == (sectors, lines)


@pytest.mark.parametrize(
    ("addresses", "width", "wavefronts", "ideal"),
    [
        (lanes(1), 4, 1, 1),
        (lanes(2), 4, 2, 1),
        (lanes(32), 4, 32, 1),
        (lanes(33), 4, 1, 1),
        ([12] * 32, 4, 1, 1),
        (lanes(1, 8), 8, 2, 2),
        (lanes(2, 8), 8, 4, 2),
        (lanes(1, 16), 16, 4, 4),
        (lanes(2, 16), 16, 8, 4),
        (lanes(8, 16), 16, 32, 4),
        (lanes(9, 16), 16, 4, 4),
        (lanes(1, 8)[:16], 8, 1, 1),
        ([i * 2 for i in range(32)], 2, 1, 1),
        # Lanes that share a vector with lane t ^ 1 or t ^ 2 halve the passes.
        ([64] * 32, 8, 1, 1),
        ([64] * 32, 16, 2, 2),
        ([i // 2 * 8 for i in range(32)], 8, 1, 1),
        ([i // 2 * 16 for i in range(32)], 16, 2, 2),
        ([i // 2 * 128 for i in range(32)], 8, 16, 1),
        ([(i // 4 * 2 + i % 2) * 16 for i in range(32)], 16, 2, 2),
        # Not those that share otherwise, or not all of them.
        ([i % 16 * 8 for i in range(32)], 8, 2, 2),
        ([(i // 8 * 4 + i % 4) * 8 for i in range(32)], 8, 2, 2),
        ([min(i // 2, 14) * 8 for i in range(31)] + [120], 8, 2, 2),
        ([i // 2 * 16 for i in range(16)] + [i * 16 for i in range(16, 32)], 16, 4, 4),
        # A lane that is off agrees with its partner.
        ([None if i % 2 else i // 2 * 8 for i in range(32)], 8, 1, 1),
        ([0, None, *[8] * 30], 8, 1, 1),
        ([None] * 32, 16, 0, 0),
    ],
)
def test_shared_requests(addresses, width, wavefronts, ideal):
    request = access.shared_request(addresses, width)
    assert (request.wavefronts, request.ideal) == (wavefronts, ideal)
    assert request.conflicts == wavefronts - ideal


def test_shared_wavefronts_against_counting_by_hand():
    """At most 4 bytes a lane: the wavefronts are the most distinct words that any one bank is asked for."""
    rng = random.Random(3)
    for _ in range(200):
        addresses = [4 * rng.randrange(256) for _ in range(32)]
        words: dict[int, set[int]] = {}
        for a in addresses:
            words.setdefault(a // 4 % 32, set()).add(a)
        assert access.shared_request(addresses, 4).wavefronts == max(map(len, words.values()))


def test_a_request_refuses_what_the_hardware_lacks():
    with pytest.raises(ValueError, match="lane 1: address 6 is not aligned"):
        access.global_request([0, 6], 4)
    with pytest.raises(ValueError, match="width must be one of"):
        access.shared_request([0], 12)
    with pytest.raises(ValueError, match="at most 32 lanes"):
        access.shared_request([0] * 33, 4)


def test_row_copy_is_perfect():
    report = access.check_copy(ROW, (4, 256), element_bytes=2, vector=8)
    assert report.coverage.exact
    assert (report.requests, report.sectors, report.lines, report.efficiency) == (4, 64, 16, 1.0)
    assert "all 1,024 elements exactly once" in "\n".join(report.lines_of_text())


def test_rows_that_start_off_a_vector_are_refused():
    odd = Layout((4, 256), (1001, 1))
    with pytest.raises(
        ValueError, match=r"thread 32, value 0: byte address 2002 is not aligned to the 16-byte"
    ):
        access.check_copy(ROW, (4, 256), odd, element_bytes=2, vector=8)
    narrowed = access.check_copy(ROW, (4, 256), odd, element_bytes=2, vector=1)
    assert narrowed.efficiency < 0.2  # one element a lane, eight elements apart


def test_columns_of_a_row_major_tile_conflict_in_shared_memory_until_padded_or_swizzled():
    down = operations.thread_value_layout(Layout((32, 4)), Layout((1, 8)))[1]
    plain = access.check_copy(
        down, (32, 32), Layout((32, 32), (32, 1)), element_bytes=4, vector=1, space="shared"
    )
    padded = access.check_copy(
        down, (32, 32), Layout((32, 32), (33, 1)), element_bytes=4, vector=1, space="shared"
    )
    swizzled = access.check_copy(
        down, (32, 32), parse("S<5,0,5> o 0 o (32,32):(32,1)"), element_bytes=4, vector=1, space="shared"
    )
    assert plain.conflicts == 31 * plain.requests
    assert padded.conflicts == swizzled.conflicts == 0


def test_coverage_names_what_is_missing_and_repeated():
    half = access.coverage(parse("((32,4),4):((32,1),4)"), (4, 256))
    assert not half.exact and len(half.missing) == 512 and half.missing[0] == (0, 4)
    shared = access.coverage(parse("((8,4),4):((4,0),1)"), (4, 8))
    assert shared.most == 4 and not shared.missing and len(shared.repeated) == 32
    with pytest.raises(ValueError, match=r"thread 8 value 0 .* is at index 1024, past the 1024 elements"):
        access.coverage(parse("((8,4),8):((32,1024),4)"), (4, 256))
    with pytest.raises(ValueError, match="two modes"):
        access.coverage(Layout((2, 2, 2)), (2, 4))


@pytest.mark.long
def test_predictions_match_every_built_kernel(monkeypatch):
    """Each measured kernel builds for sm_90a, and its access under test is one instruction of its width."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    compile_as_is = cute.compile
    monkeypatch.setattr(
        cute, "compile", lambda *a, options: compile_as_is(*a, options=options + " --keep-ptx")
    )
    for case in measure_access.CASES:
        ptx = measure_access.build(case, fake=True)[0].__ptx__
        suffix = {4: "b32", 8: "v2.b32", 16: "v4.b32"}[case.width]
        wanted = {"global": "ld.global", "load": "ld.shared", "store": "st.shared"}[case.space]
        found = re.findall(rf"\b{re.escape(wanted)}\.([\w.]+)", ptx)
        assert found == [suffix], case.name


NCU = """#!{python}
import sys
sys.path.insert(0, {here!r})
import measure_access as m
names = list(m.COUNTERS.values())
if "--query-metrics" in sys.argv:
    known = [n.removesuffix(".sum") + "   Counter  a description" for n in names[:-1]]
    print("Device H200", *known, sep=chr(10))
    sys.exit()
asked = sys.argv[sys.argv.index("--metrics") + 1].split(",")
assert asked == names[:-1] and sys.argv[-1] == "--launch"
quoted = lambda cells: ",".join(f'"{{c}}"' for c in cells)
print("==PROF== Connected to process 7")
print(quoted(["ID", "Kernel Name", *asked]))
print(quoted(["", "", *["sector"] * len(asked)]))
for i, case in enumerate(m.CASES):
    counts = {{m.COUNTERS[k]: v for k, v in m.predict(case).items()}}
    print(quoted([i, "kernel_cutlass_access", *[f"{{counts.get(a, 0):,}}" for a in asked]]))
"""


def test_measuring_reads_what_ncu_prints(tmp_path):
    """With a stand-in for ncu that knows one metric less and counts exactly what is predicted."""
    fake = tmp_path / "ncu"
    fake.write_text(NCU.format(python=sys.executable, here=str(ROOT / "docs/layouts")))
    fake.chmod(0o755)
    results = measure_access.measure(str(fake))
    assert [r["name"] for r in results] == [c.name for c in measure_access.CASES]
    for result in results:
        assert "store_requests" not in result["measured"]
        for counter, value in result["predicted"].items():
            assert result["measured"].get(counter, value) == value


def test_measuring_says_what_ncu_said_when_it_fails(tmp_path):
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho no counters for you >&2\nexit 9\n")
    fake.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"ncu failed \(9\)[\s\S]*no counters for you"):
        measure_access.measure(str(fake))


def test_measuring_without_ncu_or_a_gpu_is_one_line(monkeypatch, capsys):
    for there, words in ((False, "counters need an NVIDIA GPU"), (True, "error: [Errno 2]")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert measure_access.main(["--ncu", "/nowhere/ncu", "-o", "/nowhere/access.json"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(words) and said.count("\n") == 1


def test_predictions_against_measured_counters():
    """Of every case: equal, or among the differences that docs/layouts/access.md explains."""
    if not COUNTERS.exists():
        pytest.skip("no measured counters are committed: run docs/layouts/measure_access.py on a GPU")
    rows = json.loads(COUNTERS.read_text(encoding="utf-8"))["rows"]
    cases = {case.name: case for case in measure_access.CASES}
    assert [row["name"] for row in rows] == [*cases]
    for row in rows:
        predicted = measure_access.predict(cases[row["name"]])
        assert row["predicted"] == predicted, row["name"]
        measured = {k: row["measured"][k] for k in predicted if k in row["measured"]}
        if row["name"] not in measure_access.EXPLAINED:
            assert measured == {k: predicted[k] for k in measured}, row["name"]
