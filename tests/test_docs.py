"""The docs: what is generated is up to date, examples and commands run, links lead somewhere."""

import doctest
import inspect
import json
import operator
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import concept_figures
import excerpts
import generate
import ladder_page
import measure_access
import opinfo
import performance_page
import pytest
import reference
import reinforce
import sample
import torch
import train

import cute_softmax
from benchmarks import results, step, traffic
from benchmarks.__main__ import main as benchmarks_main
from benchmarks.suites import SUITES
from cute_softmax.__main__ import main
from cute_softmax.commands import demo
from cute_softmax.plan.catalogue import classes, longest_row, operand_dtypes
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.runtime import cache, precompile
from layouts.__main__ import main as layouts_main
from layouts.figures import scene
from layouts.style import text_width

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/layouts").glob("*.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def pages(language: str) -> list:
    return [p for p in PAGES if blocks(p, language)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.long
def test_generated_parts_are_up_to_date():
    command = [sys.executable, ROOT / "docs" / "generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_block_is_noticed():
    text = "<!-- generated: class counts -->\nold\n<!-- end of class counts -->\n"
    assert "old" not in generate.filled(text) and "sm_103a" in generate.filled(text)
    with pytest.raises(KeyError):
        generate.filled("<!-- generated: nothing -->\n<!-- end of nothing -->")


def test_code_on_a_page_is_that_of_the_source():
    said = excerpts.BLOCKS["code of a tile"]()
    assert "```py\ndef tile(self" in said and said.count("\n    ...\n") == 2
    assert "\n    held = self.hold(rows, known)\n" in said and "# Before" not in said
    lines = {
        line.strip() for path in excerpts.KERNELS.rglob("*.py") for line in path.read_text().splitlines()
    }
    for make in excerpts.BLOCKS.values():
        code = make().split("```")[1].splitlines()[1:]
        assert len(code) > 5 and all(line.strip() in lines | {"..."} for line in code)


def test_the_kernel_is_read_with_the_numbers_of_its_call():
    """Those that the text says: where a table gives this call another class, it must be read anew."""
    text = " ".join((ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split())
    p = cute_softmax.plan_softmax(generate.FOLLOWED)
    c, (rows, columns) = p.kernel, generate.FOLLOWED
    assert c.rows_per_thread == 1 and c.keep and c.rows_end_alike and not (c.persistent or c.keeps_shared)
    assert {*c.staging} == {"direct"} and c.reduction_buffer.shape == (1, (8, 4), 1)
    for words in (
        f"the softmax of {rows} rows of {columns} in bfloat16",
        f"The *tile* of a CTA is {c.tiler[0]} x {c.tiler[1]}",
        f"in steps of {c.step_tiler[1]} columns, {c.vector} neighbouring elements to each of {c.threads} threads",
        f"here (({c.vector}, {c.rows_per_thread}), 1, {c.steps})",
        f"The {8 * c.cluster_n} states of a row",
        f"each CTA takes {p.share}, the last one the {columns - (c.cluster_n - 1) * p.share} that are left",
        f"{c.steps} x 16 bytes on their way",
        f"the maximum of its {c.steps * c.vector} elements",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    "name, parts, told",
    [
        ("RowKernel.nothing", (), "row.py has no RowKernel.nothing"),
        ("RowKernel.tile", (("no such line", "x"),), "0 lines begin with 'no such line'"),
        ("RowKernel.tile", (("if const_expr", "x"),), "lines begin with 'if const_expr'"),
        (
            "RowKernel.tile",
            (("maths = ", "no such line"),),
            "no line behind 'maths = ' begins with 'no such line'",
        ),
        (
            "RowKernel.tile",
            (("maths = ", "states"), ("held = ", "held")),
            "lines begin with 'held = '",
        ),
    ],
)
def test_code_that_has_gone_is_noticed(name, parts, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        excerpts.excerpt(excerpts.ROW, name, *parts)


def test_results_become_tables(monkeypatch, tmp_path):
    header = {key: key for key in results.HEADER_KEYS} | {
        "gpu": "NVIDIA H200",
        "date": "2026-01-02T03:04:05Z",
    }
    speeds = {"cute_softmax": 100.0, "copy": 99.0, "torch": 200.0}
    rows = [
        results.make_row("rows-forward", case, provider, "events-cold", us=us, gbps=4e5 / us, spread=0.01)
        for case in SUITES["rows-forward"].cases
        for provider, us in speeds.items()
    ]
    results.add_ratios(rows)
    folder = results.save(results.Results(header, rows), tmp_path).parent
    (folder / "counters.json").write_text('{"header": {}, "rows": []}')  # of another kind
    monkeypatch.setattr(performance_page, "RESULTS", folder)
    said = performance_page.suites("results of rows")
    assert "| 32768 x 1024 | **4000 0.990** | 4040 1.000 | 2000 0.495 |" in said
    assert "2026-01-02" in said and "`command`" in said
    link = "[Softmax over rows, forward](performance-rows.md#softmax-over-rows-forward)"
    assert f"| {link} | {len(SUITES['rows-forward'].cases)} | 0.99 | 0.50 |  |" in performance_page.overview()
    assert performance_page.suites("results of products") == performance_page.NOTHING


def test_cells_where_a_peer_is_faster_are_told(monkeypatch, tmp_path):
    header = dict.fromkeys(results.HEADER_KEYS, "x") | {"gpu": "NVIDIA H100 80GB"}
    slow, fast, *_ = SUITES["rows-forward"].cases
    speeds = {slow: (120.0, 100.0), fast: (100.0, 120.0)}
    rows = [
        results.make_row("rows-forward", case, provider, "events-cold", us=us, gbps=4e5 / us, spread=0.01)
        for case, (ours, peers) in speeds.items()
        for provider, us in {"cute_softmax": ours, "quack": peers, "copy": 99.0}.items()
    ]
    results.add_ratios(rows)
    results.save(results.Results(header, rows), tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    said = performance_page.peers_ahead()
    assert said.startswith("1 of 2 cells: quack 1.")
    assert f"| H100, rows-forward | softmax, bf16, {slow.label} |" in said and fast.label not in said
    assert "| 120 µs | quack, 100 µs | 1.200 |" in said


def test_the_first_system_s_table_marks_the_fastest(monkeypatch, tmp_path):
    header = dict.fromkeys(results.HEADER_KEYS, "x") | {"gpu": "NVIDIA H100 80GB HBM3"}
    case = SUITES["rows-forward"].cases[0]
    speeds = {"cute_softmax": 50.0, "copy": 48.0, "quack": 49.0}
    rows = [
        results.make_row("rows-forward", case, name, "events-cold", us=us, gbps=134218 / us, spread=0.01)
        for name, us in speeds.items()
    ]
    results.add_ratios(rows)
    results.save(results.Results(header, rows), tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    said = ladder_page.first_table()
    assert f"| {case.label} | 2740 to 3000, 0.049 to 0.045 | 2684, 0.050 | 2796, 0.048 |" in said
    assert "| refuses | refuses | **2739, 0.049** | refuses |" in said


def test_steps_become_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert step.COMMAND in performance_page.steps()
    (tmp_path / "h100" / "checks").mkdir(parents=True)
    way = {"ms": 20.0, "peak_bytes": 3e9, "loss": 1.0}
    header = dict.fromkeys(results.HEADER_KEYS, "x") | {"gpu": "NVIDIA H100 80GB"}
    ways = {"torch": way | {"ms": 25.0}, "accelerated": way, "patched": way | {"ms": 12.5, "peak_bytes": 2e9}}
    found = {"header": header, "rows": [{"label": "small"} | ways]}
    (tmp_path / "h100" / "checks" / f"{step.NAME}.json").write_text(json.dumps(found))
    line = "25.0 ms, 3.00 GB | 20.0 ms (1.25 times as fast), 3.00 GB | 12.5 ms (2.00 times as fast), 2.00 GB"
    assert f"| H100: small | {line} |" in performance_page.steps()


def test_heat_maps_are_shown_where_they_are_drawn(monkeypatch, tmp_path):
    name = f"{performance_page.MAP}columns"
    header = dict.fromkeys(results.HEADER_KEYS, "x") | {"gpu": "NVIDIA H100 80GB"}
    case = SUITES["rows-forward"].cases[0]
    rows = [results.make_row(name, case, "copy", "events-cold", us=1.0, gbps=1.0, spread=0.0)]
    results.add_ratios(rows)
    path = results.save(results.Results(header, rows), tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert "No map is committed" in performance_page.heat_maps()
    path.with_suffix(".svg").write_text("<svg/>")
    assert f"{name}.svg)" in performance_page.heat_maps()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_opened_block_is_closed_and_filled(page):
    text = page.read_text(encoding="utf-8")
    opened = re.findall(r"<!-- generated: (.+?) -->", text)
    assert opened == re.findall(r"<!-- end of (.+?) -->", text)
    assert not re.search(r"-->\s*<!-- end of", text)


@pytest.mark.parametrize("page", pages("python"), ids=name_of)
def test_python_examples_run(page, monkeypatch, tmp_path):
    """All blocks of a page in order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)


@pytest.mark.parametrize("page", pages("pycon"), ids=name_of)
def test_sessions_say_what_they_show(page):
    for session in blocks(page, "pycon"):
        test = doctest.DocTestParser().get_doctest(session, {}, page.name, None, None)
        said = []
        assert not doctest.DocTestRunner().run(test, out=said.append).failed, "".join(said)


def commands(page: Path) -> list[tuple[str, ...]]:
    """The words of each command that a page shows in full: in its bash blocks, indented, or within a sentence."""
    text = page.read_text(encoding="utf-8")
    outside = FENCE.sub("", text)
    shown = "".join(blocks(page, "bash")).splitlines()
    shown += re.findall(r"^ {4}(python .+?)(?:  .*)?$", outside, re.M)
    shown += [
        code
        for code in re.findall(r"`([^`]+)`", outside)
        if re.match(r"(python|cute-softmax|make|pip)\s", code)
    ]
    split = [tuple(shlex.split(line, comments=True)) for line in shown]
    return [
        words for words in split if not {"FILE", "[FILE...]", "[SLICE...]", "[JOB...]"} & {*words}
    ]  # these are usage


COMMANDS = dict.fromkeys(
    words
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    for words in commands(page)
)


def run_make(target: str) -> int:
    """Whether there is this target, as a status."""
    return int(target not in re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))


def run_pip(install: str, what: str) -> int:
    """Whether it names extras that there are, as a status; that they install is tested with the wheel."""
    extra = re.fullmatch(r"(?:\.|cute-softmax)(?:\[(\w+)\])?", what)[1]
    assert install == "install"
    return int(extra is not None and f"\n{extra} = [" not in (ROOT / "pyproject.toml").read_text())


def run_python(what: str, *words: str) -> int:
    """The status of a module or a script."""
    if what in (
        "docs/layouts/gallery.py",
        "tests/occupancy.py",
    ):  # what it writes is compared by a test of its own
        return int(not (ROOT / what).exists())
    mains = {
        "cute_softmax": main,
        "layouts": layouts_main,
        "benchmarks": benchmarks_main,
        "benchmarks.step": step.main,
        "benchmarks.traffic": traffic.main,
        "tests/opinfo.py": opinfo.main,
        "docs/layouts/measure_access.py": measure_access.main,
        "examples/reinforce.py": reinforce.main,
        "examples/sample.py": sample.main,
        "examples/train.py": train.main,
    }
    name, *arguments = words if what == "-m" else (what, *words)
    try:
        return mains[name](arguments)
    except SystemExit as stopped:
        return stopped.code


def needs_gpu(words: tuple[str, ...]) -> bool:
    """Whether a command measures."""
    measuring = {"--suite", "--save", "map", "tune", "bits", "sharded"}
    scripts = {"benchmarks.step", "benchmarks.traffic", "docs/layouts/measure_access.py"}
    return "--list" not in words and bool((measuring | scripts) & {*words})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_run(words, tmp_path, monkeypatch, capsys):
    """In an empty folder, on a machine without a GPU; the demo of fewer groups, which are as long as the page says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "store"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precompile, "precompile", iter)  # that takes minutes: a test of its own compiles some
    run_demo = demo.run

    def fewer(shape, dtype, out, dim):
        return run_demo(
            tuple(n if d == dim % 2 else min(n, 600) for d, n in enumerate(shape)), dtype, out, dim
        )

    monkeypatch.setattr(demo, "run", fewer)
    few = opinfo.tasks()[:2]
    monkeypatch.setattr(opinfo, "tasks", lambda: few)
    runs = {"python": run_python, "make": run_make, "pip": run_pip}
    run = runs.get(words[0], lambda *arguments: main(arguments))
    status, said = run(*words[1:]), capsys.readouterr()
    if needs_gpu(words):
        assert status == 2 and "an NVIDIA GPU" in said.err and "there is none here" in said.err
        assert not any(tmp_path.iterdir())
    elif words[1:4] == ("-m", "benchmarks", "check"):
        assert status == int("FAIL" in said.out) and said.err == ""
    else:
        assert status == 0, said.err


@pytest.mark.parametrize("name", ["layouts", "benchmarks"])  # `cute_softmax`: see test_demo
def test_modules_are_commands(name):
    done = subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m {name} "), done.stderr


def test_commands_of_all_kinds_are_found():
    """What the pages show, as a person would count it."""
    kinds = Counter(words[2].split(".")[0] if words[1] == "-m" else words[0] for words in COMMANDS)
    known = {"cute_softmax", "cute-softmax", "layouts", "benchmarks", "make", "pip", "python"}
    assert {*kinds} - {"cute_softmax"} == known - {"cute_softmax"}
    assert kinds["layouts"] >= 3 and kinds["make"] >= 3 and kinds["cute_softmax"] + kinds["cute-softmax"] > 40
    for some in (
        "cute-softmax demo 4096x8192 --dim 0",  # in a block
        "python -m cute_softmax precompile",  # in a sentence
        "python -m cute_softmax diagrams 200000x1024 --dtype bf16 --dim 0 -o out/",  # below docs/layouts
        "python -m benchmarks --suite all --save --plot",  # indented
    ):
        assert tuple(some.split()) in COMMANDS


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" not in target:
            place = page.parent / target if target else page
            assert place.exists(), target
            assert not anchor or anchor in anchors(place), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_compared_with_torch_compile_has_its_version(page):
    """Each table, at its end or that of its block; each plot, where it names the curve."""
    text = page.read_text(encoding="utf-8")
    for table in re.finditer(r"^\|.*torch\.compile.*\n\| ?-", text, re.M):
        rest = text[table.end() :].partition("<!-- end of")[0]
        assert re.search(r"torch(\.compile)? 2\.\d+\.\d+", rest), text[table.start() : table.end()]
    for plot in re.findall(r"\]\((\S+results/\S+\.svg)\)", text):
        drawn = (page.parent / plot).read_text(encoding="utf-8")
        assert not re.search(r"torch\.compile(?! 2\.\d)", drawn), plot


def test_every_page_is_in_the_index():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in text


def test_limits_name_the_longest_rows():
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    for dtype, words in (("bf16", "{:,} elements in 16 bit"), ("fp32", "{:,} in 32 bit")):
        for arch in ("sm_90a", "sm_100a"):
            *_, last = classes("softmax", ARCHITECTURES[arch], operand_dtypes("softmax", dtype))
            assert words.format(longest_row(last)) in text
    for name in ARCHITECTURES:
        assert name.removeprefix("sm_") in text


def test_rows_are_read_once_as_far_as_the_pages_say():
    """Of one row and of many, of even and odd lengths; and no further."""
    lengths = [
        n + odd for e in range(40, 97) for n in [int(2 ** (e / 4))] for odd in (-1, 0, 1) if n + odd <= 2**24
    ]
    for dtype, shorter in (("bf16", 0), ("fp32", 1)):
        for rows in (1, 2, 3, 4, 8, 15, 16, 17, 100):
            longest = 2 ** ((24 if rows >= 16 else 20) - shorter)
            for n in lengths:
                told = cute_softmax.plan_softmax((rows, n), dtype=dtype).explain()
                assert "every element read once" in told or n > longest, (dtype, rows, n)
        for rows, n in ((16, 2**25), (1, 2**24)):
            assert (
                "chunks read twice" in cute_softmax.plan_softmax((rows, n >> shorter), dtype=dtype).explain()
            )


def test_docstrings_describe_what_is_public():
    assert reference.complaints() == []
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in (*cute_softmax.__all__, "nn.Softmax", "Plan", "PanelPlan", "Prepared", "Report", "Device"):
        assert f"\n### {name}\n" in page or name in ("integrations", "nn", "sampling")


@pytest.mark.parametrize(
    "name, old, new, said",
    [
        (
            "softmax",
            "\n    dim: ",
            "\n    dims: ",
            ["Parameter 'dims' does not appear", "no words about dim"],
        ),
        ("softmax", "\n    alpha: ", "\n    The alpha ", ["no words about alpha"]),
        ("explain", "\n    **options: ", "\n    **others: ", ["'**others'", "no words about options"]),
        ("sum", "\nReturns:\n    A", "\nA", ["no words about the result"]),
        ("amax", "\nRaises:", "\nErrors:", ["a section of admonition"]),
        ("nn.Softmax", "\n    alpha: ", "\n        alpha: ", ["no words about alpha"]),
        ("Plan", "\n    rows: ", "\n    row: ", ["no attribute row", "Plan.rows: no docstring"]),
        ("Device", "\n    l2: ", "\n        l2: ", ["no words about l2", "Device.l2: no docstring"]),
    ],
)
def test_what_a_docstring_lacks_is_noticed(monkeypatch, name, old, new, said):
    docstring = reference.entries()[name].object.docstring
    assert docstring.value.count(old) == 1
    monkeypatch.setattr(docstring, "value", docstring.value.replace(old, new))
    complaints = reference.complaints()
    assert all(any(words in complaint for complaint in complaints) for words in said), complaints


def test_a_new_public_name_must_be_described(monkeypatch):
    from cute_softmax.dispatch.softmax import kernels

    monkeypatch.setattr(cute_softmax, "offset_within", kernels.offset_within, raising=False)
    monkeypatch.setattr(cute_softmax, "__all__", [*cute_softmax.__all__, "offset_within"])
    monkeypatch.setattr(cute_softmax.nn, "__all__", ["_Options"])
    reference.entries.cache_clear()
    complaints = reference.complaints()
    reference.entries.cache_clear()
    assert "cute_softmax.dispatch.softmax.kernels.offset_within: no words about shape" in complaints
    assert "cute_softmax.nn._Options.scale: no docstring" in complaints


def test_signatures_are_those_that_python_shows():
    functions = {e.name: e.object for e in reference.entries().values() if e.object.is_function}
    assert len(functions) > 15
    for name, function in functions.items():
        shown = inspect.signature(operator.attrgetter(name)(cute_softmax)).parameters.values()
        assert [(p.name, p.kind.value) for p in function.parameters] == [
            (p.name, p.kind.description) for p in shown
        ]
        for written, real in zip(function.parameters, shown, strict=True):
            if real.default is not inspect.Parameter.empty:
                assert eval(str(written.default), {"H200": H200, "torch": torch}) == real.default, (
                    name,
                    written.name,
                )


@pytest.mark.parametrize("name", concept_figures.FIGURES)
def test_figures_of_ideas_are_legible(name):
    """Words stay inside the figure, and those in a box inside the box."""
    figure = concept_figures.FIGURES[name]()
    boxes = [item for item in figure.items if isinstance(item, scene.Box)]
    assert figure.width <= 1400
    for item in figure.items:
        if isinstance(item, scene.Cell):
            assert all(text_width(line, "cell") <= item.width for line in item.lines), item.lines
        elif isinstance(item, scene.Words):
            wide = text_width(item.text, item.voice)
            left = item.x - {"start": 0, "middle": wide / 2, "end": wide}[item.anchor]
            assert left >= 0 and left + wide <= figure.width, item.text
            around = [b for b in boxes if b.x <= item.x <= b.x + b.width and b.y <= item.y <= b.y + b.height]
            if around:
                inner = min(around, key=lambda b: b.width * b.height)
                assert left + wide <= inner.x + inner.width + 1, item.text
