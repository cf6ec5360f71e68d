"""Figures of topk_softmax: of every capacity, both directions, and from the command line."""

import itertools
import re

import pytest

from cute_softmax import draw, plan_topk_softmax
from cute_softmax.__main__ import main

PLANS = [
    ((rows, columns), k, {"backward": backward, "renormalize": renormalize})
    for (rows, columns, k), backward, renormalize in itertools.product(
        ((3, 8, 2), (1 << 20, 64, 8), (100, 60, 4), (100, 1023, 40), (4096, 256, 8)),
        (False, True),
        (False, True),
    )
]


@pytest.mark.parametrize(("shape", "k", "options"), PLANS, ids=str)
def test_figures(shape, k, options):
    plan = plan_topk_softmax(shape, k, **options)
    c, found = plan.kernel, draw.figures(plan)
    wanted = {"tile", "thread"} | (set() if c.forward else {"spread"})
    assert set(found) == wanted | ({"shuffle"} if c.threads_per_row > 1 else set())
    assert all("<svg" in figure.svg() for figure in found.values())
    told = found["tile"].svg()
    assert ("behind these are not loaded" in told) == (shape[1] < c.capacity)
    assert f"{c.length} largest" in told or not c.forward
    if c.forward and c.merges:
        merged = found["shuffle"].svg()
        assert all(what in merged for what in c.merges) and f"merged into one of {c.kept}" in merged
    assert draw.overview(plan).svg() and draw.page(plan)["steps"]


def test_the_memory_that_is_drawn_is_that_of_the_rows():
    for options, stride in (({}, 60), ({"backward": True, "renormalize": True}, 60)):
        plan = plan_topk_softmax((100, 60), 4, **options)
        view = draw.MODULES["topk"].View(plan)
        assert view.memory((3, 5)) == 3 * stride + 5
        assert view.name == ("gDX" if options else "gX")
    with pytest.raises(ValueError, match="thread must be 0 to 127"):
        draw.figures(plan, 128)


def test_from_the_command_line(tmp_path, capsys):
    for backward in ([], ["--backward"]):
        assert main(["diagrams", "4096x160", "--topk", "6", *backward, "-o", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert "6 of 4096 rows of 160" in said and (tmp_path / "explorer.html").exists()
        assert (tmp_path / "spread.svg").exists() == bool(backward)
        assert main(["explain", "4096x160", "--topk", "6", "--dtype", "fp32", *backward]) == 0
        assert re.search(r"6 of 4096 rows of 160, fp32", capsys.readouterr().out)
    for wrong in (["--dim", "0"], ["--matmul", "64"], ["--topk", "161"]):
        assert main(["explain", "4096x160", "--topk", "6", *wrong]) == 2
        assert "error: " in capsys.readouterr().err
    assert main(["diagrams", "4096x160", "--topk", "6", "--two-pass"]) == 2
