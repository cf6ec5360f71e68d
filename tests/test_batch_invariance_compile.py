"""Classes that only batch-invariant plans have: they compile, without spills, and access memory as they say."""

import pytest
from compiled import check_compiled, compile_and_read
from test_batch_invariance_plan import planned

ODD, MANY = 50257, 1048577
# (math, columns, dtype, how the full tensors lie)
CASES = [
    ("softmax", ODD, "bf16", {}),
    ("softmax", ODD, "fp32", {}),
    ("softmax_backward", 1001, "bf16", {}),
    ("log_softmax", 33, "bf16", {}),
    ("softmax", 32000, "bf16", {"full": (32008, 1), "offset": 3}),
    ("logsumexp", 32000, "fp32", {"full": (32001, 1), "offset": 1}),
    ("selective", 32000, "bf16", {}),
    ("selective", ODD, "fp32", {}),
    ("selective", 1 << 20, "bf16", {}),
    ("logsumexp", 1 << 20, "bf16", {}),
    ("sum", MANY, "bf16", {}),
    ("softmax", MANY, "bf16", {}),
]


@pytest.mark.parametrize(("math", "columns", "dtype", "how"), CASES, ids=lambda v: str(v))
def test_classes(math, columns, dtype, how, tmp_path, monkeypatch):
    c = planned(math, (8, columns), dtype=dtype, **how).kernel
    found = compile_and_read(c, tmp_path, monkeypatch)
    # What an index out of range prints lies on the stack.
    check_compiled(c, found, stack=32 if math == "selective" else 0, padding=128)
    widths = {"bf16": 2, "fp32": 4}
    if how:  # rows that begin on no vector are loaded by the element
        assert c.access == (1,) and c.vector > 1
        assert any(
            "ld.global" in line and f".b{8 * widths[dtype]}" in line for line in found.ptx.splitlines()
        )


def test_vectors_of_one_element_are_stored_alone(tmp_path, monkeypatch):
    c = planned("softmax", (8, 1001)).kernel
    assert c.vector == 1 and not c.edges and c.access == (1,)
    found = compile_and_read(c, tmp_path, monkeypatch)
    stores = [line for line in found.ptx.splitlines() if "st.global" in line]
    assert stores and not any(".v" in line for line in stores)
