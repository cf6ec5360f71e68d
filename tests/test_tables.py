"""Tables of configurations: what their lines say, and that plans are made of them."""

from dataclasses import replace

import pytest

from cute_softmax.plan import MATHS, row_class, row_configs
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.tables import table


def test_tables_hold_configurations_in_order():
    """What a stranger to the code may edit: names that there are, lengths in order, lists that are named."""
    rows, panels = table()["row"], table()["panel"]
    for lists in (rows["many"], rows["few"]):
        assert set(lists) == {math for math, _ in MATHS}
        for found in lists.values():
            assert not isinstance(found, str) or not isinstance(lists[found], str)
    for found in (*row_configs.MANY.values(), *row_configs.FEW.values()):
        for precise in (True, False):
            capacities = [c.capacity for c in found if c.precise in (None, precise)]
            assert capacities == sorted(capacities)
    for name in ("held", "shifted", "deep"):
        for inputs, found in panels[name].items():
            assert found and inputs[-1] in "12"
    with pytest.raises(TypeError, match="wide"):
        row_configs.RowConfig(threads_per_row=4, steps=1, wide=2)


def test_a_table_is_what_plans_are_made_of(monkeypatch):
    """A shorter first configuration in its place is another class."""
    first, *others = row_configs.MANY["softmax"]
    longer = replace(first, steps=2)
    before = row_class("softmax", H200.architecture, ("bf16", "bf16"), 64, edges=False, access=(8,))
    monkeypatch.setitem(row_configs.MANY, "softmax", (longer, *others))
    row_configs.configurations.cache_clear()
    after = row_class("softmax", H200.architecture, ("bf16", "bf16"), 64, edges=False, access=(8,))
    row_configs.configurations.cache_clear()
    assert before.threads_per_row != after.threads_per_row == first.threads_per_row
