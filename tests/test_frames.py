"""Room for frames: loops of calls at any depth ask the system for no memory."""

import resource
import threading

from cute_softmax.runtime.frames import ROOM, with_room

CALLS, DEPTH = 400, 250


def called():
    """Its frame is larger than that of its caller, so that at some depth it is the one for which no room is left."""


called.__code__ = called.__code__.replace(co_stacksize=100)


def faults_at_every_depth(depth: int = DEPTH) -> list[int]:
    """Pages that the system gave a loop of calls, at each depth of frames down to one."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        called()
    here = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return [here, *(faults_at_every_depth(depth - 1) if depth else [])]


def in_a_thread(function) -> list[int]:
    """What a function returns whose frames no test's are below."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(function()))
    thread.start()
    thread.join()
    return found


def test_loops_ask_for_no_memory_wherever_they_are():
    found = in_a_thread(lambda: with_room(faults_at_every_depth))
    assert len(found) == DEPTH + 1 and max(found) < CALLS // 10, max(found)


def test_what_is_called_gets_its_arguments():
    assert with_room(dict, [("a", 1)], function=2) == {"a": 1, "function": 2}
    assert ROOM <= 8 * with_room.__code__.co_stacksize < 2 * ROOM
