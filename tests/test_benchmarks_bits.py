"""The record of bits, with launches simulated on the CPU."""

import json
import time
from contextlib import nullcontext

import pytest
import simulated
import torch
from checking import DTYPES
from fake_device import FakeEvent

from benchmarks import bits, launches, results


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A few small inputs, on what counts as a GPU, whose graphs are functions."""
    simulated.install(monkeypatch)
    monkeypatch.setattr(bits, "SHAPES", ((3, 7), (5, 33)))
    monkeypatch.setattr(bits, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bits, "precompile", lambda wanted, load: map(load, wanted))
    monkeypatch.setattr(bits, "CALLS", tuple(one._replace(shape=(5, 33)) for one in launches.CALLS))
    monkeypatch.setattr(launches, "MOST_CALLS", 8)
    monkeypatch.setattr(launches, "captured", lambda work: work)
    monkeypatch.setattr(launches, "_side", lambda device: lambda: time.sleep(0.01))
    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda *_: "NVIDIA H200",
        "synchronize": lambda: None,
        "Event": FakeEvent,
        "Stream": lambda: None,
        "stream": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
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
    found = bits.recorded("cpu", ["bits"], None)
    assert set(results.HEADER_KEYS) <= found["header"].keys() and found["launches"] is None
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


def test_very_many_launches(small, capsys):
    """All are alike here; each call takes part, within the mode and outside."""
    assert bits.main(["--save", "--launches", "300", "--folder", str(small)]) == 0
    (path,) = small.rglob("bits.json")
    found = json.loads(path.read_text())["launches"]
    each = 8 * 2 * len(bits.CALLS)
    assert 300 <= found["launches"] == -(-300 // each) * each and found["differing"] == {}
    assert f"{found['launches']:,} calls beside other work" in capsys.readouterr().out


def test_a_launch_with_other_bits_is_found(small, monkeypatch, capsys):
    """One of many, in one element of the second result, once captured; so is one that writes nothing."""
    count, softmax = iter(range(10**6)), launches.cute_softmax.softmax

    def now_and_then(x, *_):
        y, other = softmax(x), softmax(x)
        if next(count) == 55:  # 20 before and in the capture, 32 to time it
            other.view(-1)[3] += 0.25
        return y, other

    monkeypatch.setattr(bits, "CALLS", (launches.Repeated("softmax", now_and_then, (5, 33)),))
    assert bits.main(["--save", "--launches", "64", "--folder", str(small)]) == 1
    said = capsys.readouterr().out
    assert "softmax, 5 x 33, bf16: 1 calls gave other bits" in said and "batch-invariant:" not in said
    assert bits.main(["--launches", "64", "--folder", str(small)]) == 0

    kept = torch.zeros(5, 33, dtype=torch.bfloat16)

    def left_out(x, *_):
        if next(count) < 10:
            kept.copy_(softmax(x))
        return (kept,)

    count = iter(range(10**6))
    monkeypatch.setattr(bits, "CALLS", (launches.Repeated("softmax", left_out, (5, 33)),))
    assert bits.main(["--launches", "64", "--folder", str(small)]) == 1
    with pytest.raises(SystemExit):
        bits.main(["--launches", "-1"])


@pytest.mark.parametrize(
    "text", ["{}", '{"header": {"format": 99}, "bits": {}, "launches": null}', "[]", "no json"]
)
def test_other_files(small, text, capsys):
    path = small / "h200" / "checks" / "bits.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert bits.main(["--folder", str(small)]) == 2 and "error" in capsys.readouterr().err


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bits.main([]) == 2 and "GPU" in capsys.readouterr().err
