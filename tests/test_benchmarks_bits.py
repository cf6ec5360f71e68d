"""The record of bits, with launches simulated on the CPU."""

import json

import pytest
import simulated
import torch
from checking import DTYPES

from benchmarks import bits, results


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A few small inputs, on what counts as a GPU."""
    simulated.install(monkeypatch)
    monkeypatch.setattr(bits, "SHAPES", ((3, 7), (5, 33)))
    monkeypatch.setattr(bits, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    return tmp_path


def test_inputs_are_the_same_everywhere():
    """Made of integers: numbers that every dtype has, of which no two rows are equal."""
    x = bits.fixed((64, 1001), torch.float32, "cpu")
    assert x.abs().max() <= 8 and x.unique().numel() > 900 and len({*map(bits.digest, x)}) == 64
    assert x[0, :4].tolist() == bits.fixed((4,), torch.float32, "cpu").tolist()
    for dtype in DTYPES.values():
        rounded = bits.fixed((3, 5), dtype, "cpu")
        assert torch.equal(rounded.float(), bits.fixed((3, 5), torch.float32, "cpu").to(dtype).float())
    assert bits.digest(bits.fixed((8, 9), torch.float32, "cpu")) == "fb09e78140afe950"


def test_what_is_recorded(small):
    found = bits.recorded("cpu", ["bits"])
    assert set(results.HEADER_KEYS) <= found["header"].keys()
    assert found["header"]["table"].startswith("h200, ") and found["header"]["version"]
    both = [what.removesuffix(", batch-invariant") for what in found["bits"]]
    assert all(both.count(what) == 2 for what in both)
    assert {what.split(",")[0] for what in both} == set(bits.FUNCTIONS)


def test_save_and_compare(small, capsys):
    assert bits.main(["--folder", str(small)]) == 2 and "error" in capsys.readouterr().err
    assert bits.main(["--save", "--folder", str(small)]) == 0
    (path,) = small.rglob("bits.json")
    assert path.parent == small / "h200" / "checks"
    capsys.readouterr()
    assert bits.main(["--folder", str(small)]) == 0
    assert capsys.readouterr().out.startswith("0 of ")
    held = json.loads(path.read_text())
    changed, gone, *_ = held["bits"]
    held["bits"] |= {changed: "0" * 16, "another result": "1" * 16}
    del held["bits"][gone]
    held["header"]["version"] = "0.0.1"
    path.write_text(json.dumps(held))
    assert bits.main(["--folder", str(small)]) == 1
    said = capsys.readouterr().out
    assert f"{changed}: {'0' * 16} -> " in said and f"{gone}: not recorded -> " in said
    assert f"another result: {'1' * 16} -> not there any more" in said and "3 of " in said
    assert "version: 0.0.1 -> " in said


@pytest.mark.parametrize("text", ["{}", '{"header": {"format": 99}, "bits": {}}', "[]", "no json"])
def test_other_files(small, text, capsys):
    path = small / "h200" / "checks" / "bits.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert bits.main(["--folder", str(small)]) == 2 and "error" in capsys.readouterr().err


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bits.main([]) == 2 and "GPU" in capsys.readouterr().err
