"""Workspaces of ranks that write into each other's memory: when a group gets them, what a time-out leaves behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cute_softmax.plan.hardware import H200
from cute_softmax.runtime import peers


@pytest.fixture
def group(monkeypatch):
    """Of one rank, on what counts as a GPU that captures nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(peers, "_known", {})
    monkeypatch.setattr(peers, "device_facts", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="this"))
    yield dist.group.WORLD
    dist.destroy_process_group()


def workspace(group, device=0) -> peers.Workspace:
    memory = torch.zeros(16, dtype=torch.uint8)
    return peers.Workspace(group, device, memory, None, torch.zeros(1), torch.zeros(1, dtype=torch.int32))


def test_they_are_made_before_a_graph_is_captured(group, monkeypatch):
    """During capture a group has those that it had before."""
    monkeypatch.setattr(peers, "_shared", workspace)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert peers.workspace_of(group, 0) is None and peers.reaches(group) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = peers.workspace_of(group, 0)
    assert made is not None and peers.reaches(group)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert peers.workspace_of(group, 0) is made
    monkeypatch.setenv("CUTE_SOFTMAX_PEERS", "0")
    assert peers.workspace_of(group, 0) is None


def other(mine, place, value):
    return (*mine[:place], value, *mine[place + 1 :])


@pytest.mark.parametrize(
    ("place", "value", "reached"),
    [
        (None, None, False),  # two ranks on one GPU
        (-1, "another", True),
        (0, "another host", False),
        (2, "another version of the package", False),
        (3, "another torch", False),
    ],
)
def test_ranks_of_one_host_and_one_version(group, monkeypatch, place, value, reached):
    def told(mine, _):
        if not isinstance(mine, tuple):
            return [mine, ""]
        apart = (*mine[:-1], "another")
        peer = mine if place is None else apart if place == -1 else other(apart, place, value)
        return [mine, peer]

    monkeypatch.setattr(peers, "_told", told)
    monkeypatch.setattr(peers, "_shared", workspace)
    assert (peers.workspace_of(group, 0) is not None) is reached
    assert peers.reaches(group) is reached


@pytest.mark.parametrize("where", ["here", "there"])
def test_no_rank_has_one_where_memory_is_not_mapped_on_one(group, monkeypatch, where):
    def shared(group, device):
        if where == "here":
            raise RuntimeError("not mapped")
        return workspace(group, device)

    def told(mine, _):
        if isinstance(mine, tuple):
            return [mine, (*mine[:-1], "another")]
        assert mine == ("not mapped" if where == "here" else "")
        return [mine, "not mapped" if where == "there" else ""]

    monkeypatch.setattr(peers, "_shared", shared)
    monkeypatch.setattr(peers, "_told", told)
    assert peers.workspace_of(group, 0) is None and peers.reaches(group) is False


def test_after_a_time_out_the_next_call_raises(group):
    made = workspace(group)
    made.check()
    assert made.numbers["patience"] >= 60 * 10**9  # minutes: a peer may still be compiling
    made.alarm[0] = 1  # as the kernel does
    with pytest.raises(RuntimeError, match="rank 0 waited for a peer"):
        made.check()


def test_launches_of_two_streams_follow_each_other(group, monkeypatch):
    said = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            return f"event of {self.name}"

        def wait_event(self, event):
            said.append((self.name, event))

    first, second = Stream("first"), Stream("second")
    monkeypatch.setattr(peers, "_last", {})
    made = workspace(group)
    for stream in (first, first, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        made.turn()
    assert said == [("second", "event of first"), ("first", "event of second")]
