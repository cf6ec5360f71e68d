"""Tables of configurations: what their lines say, that plans are made of them, and which one a GPU has."""

import json
from dataclasses import replace

import pytest

from cute_softmax import plan_softmax
from cute_softmax.plan import MATHS, RowConfig, row_class, table_of
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.table import WIDENED, Table
from cute_softmax.plan.tables import name_for, path_of, shipped
from cute_softmax.runtime import tables

DATA = json.loads(path_of("h200").read_text())


@pytest.mark.parametrize("name", shipped())
def test_tables_hold_configurations_in_order(name):
    """What a stranger to the code may edit: names that there are, lengths in order, lists that are named."""
    data, table = json.loads(path_of(name).read_text()), table_of(name)
    for lists in (data["row"]["many"], data["row"]["few"]):
        assert {name.removesuffix(WIDENED) for name in lists} == {*(math for math, _ in MATHS), "loss"}
        for found in lists.values():
            assert not isinstance(found, str) or not isinstance(lists[found], str)
    for found in (*table.many.values(), *table.few.values()):
        for precise in (True, False):
            capacities = [c.capacity for c in found if c.precise in (None, precise) and not c.least]
            assert capacities == sorted(capacities)
    capacities = [c.capacity for c in table.short]
    assert capacities == sorted(set(capacities)) and all(n % 4 == 0 for n in capacities)
    assert set(table.held) == {0, 1, 2} and set(table.shifted) == {1, 2}
    assert all(table.held.values()) and all(table.shifted.values())
    assert set(table.deep) <= {(way, inputs) for way in ("row", "column", "wide") for inputs in (1, 2)}
    with pytest.raises(TypeError, match="wide"):
        RowConfig(threads_per_row=4, steps=1, wide=2)


def written(tmp_path, change, name="mine.json"):
    """The path of a table that differs from the H200's."""
    data = json.loads(json.dumps(DATA))
    change(data)
    path = tmp_path / name
    path.write_text(json.dumps(data))
    return str(path)


def test_a_table_is_what_plans_are_made_of(tmp_path):
    """Longer first configurations of rows and panels are other classes, and `explain` names the table by its digest."""

    def change(data):
        data["row"]["many"]["softmax"][0]["steps"] = 2
        data["row"]["many"]["softmax"][2]["threads"] = 64
        data["short"][-1]["threads"] = 64
        data["panel"]["held"]["1"][0] = {"threads": 512, "steps": 16}

    path = written(tmp_path, change)
    mine, theirs = table_of(path), table_of("h200")
    assert mine.digest != theirs.digest and mine.title == f"mine, {mine.digest}"
    for shape, dim in (((60_000, 63), -1), ((4096, 72), -1), ((64, 65536), 0)):
        usual, changed = (plan_softmax(shape, dim, device=replace(H200, table=t)) for t in ("h200", path))
        assert usual.kernel != changed.kernel
        assert f"table      mine, {mine.digest}" in changed.explain()
        assert f"table      h200, {theirs.digest}" in usual.explain()
    pair = H200.architecture, ("bf16", "bf16"), 64
    assert row_class("softmax", *pair, edges=False, access=(8,), table=mine).steps == 2


def test_a_digest_is_of_what_the_lines_say():
    again = json.loads(json.dumps(DATA, indent=7))
    assert Table.of("again", again).digest == table_of("h200").digest
    again["row"]["few_above"] += 1
    assert Table.of("again", again).digest != table_of("h200").digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("panel"), "KeyError: 'panel'"),
        (lambda data: data.pop("short"), "KeyError: 'short'"),
        (lambda data: data["row"]["many"]["softmax"][0].update(wide=3), "wide"),
        (lambda data: data["row"].update(many=[]), "AttributeError"),
    ],
)
def test_what_is_no_table(tmp_path, change, words):
    with pytest.raises(ValueError, match=rf"mine\.json is no table of configurations.*{words}"):
        table_of(written(tmp_path, change))
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(ValueError, match=r"text\.json is no table"):
        table_of(str(tmp_path / "text.json"))
    with pytest.raises(FileNotFoundError):
        table_of(str(tmp_path / "none.json"))


def test_which_table_a_gpu_has(tmp_path, monkeypatch):
    """The one that is named, else the user's own, else the one measured on it, else the default."""
    monkeypatch.delenv(tables.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090")
    assert [name_for(gpu) for gpu in names] == [
        "h200",
        "h100-80gb-hbm3",
        "a100-sxm4-40gb",
        "geforce-rtx-4090",
    ]
    assert tables.table_for("NVIDIA H200") == tables.table_for("NVIDIA A100-SXM4-40GB") == "h200"
    own = tables.own_table("NVIDIA A100-SXM4-40GB")
    own.parent.mkdir(parents=True)
    own.write_text(json.dumps(DATA))
    assert tables.table_for("NVIDIA A100-SXM4-40GB") == str(own) and tmp_path in own.parents
    assert tables.table_for("NVIDIA H200") == "h200"
    monkeypatch.setenv(tables.ENVIRONMENT, "other.json")
    assert tables.table_for("NVIDIA A100-SXM4-40GB") == "other.json"
