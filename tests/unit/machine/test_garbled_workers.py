"""Workers that answer what is no answer: each is stopped, and the error says so in our type.

The process is left out: its end of the link is held by the test, which answers before it is asked.
"""

from __future__ import annotations

import json
import os
import socket
import weakref

import pytest
import torch

from layerzero.machine.faults import WorkerFault, WorkerLost, WorkerTimeout
from layerzero.machine.isolation.arena import Arena
from layerzero.machine.isolation.process import Worker
from layerzero.machine.isolation.wire import (
    CONTROL,
    FAULT,
    HEADER,
    LENGTH,
    LOADED,
    NEED,
    PAGE,
    PIPED,
    POSTED,
    RESULT,
    Link,
    Results,
    Spec,
)
from layerzero.machine.loading import LoadFailed

FORM = b"\0\0\0\0"


def of_tensor(*spec: object) -> bytes:
    return FORM + json.dumps(["tensor", [{"tensor": spec}]]).encode()


@pytest.fixture
def ends():
    """A worker without a process, and the other end of its link."""
    worker = object.__new__(Worker)
    worker.name, worker.arena = "garbled", Arena(1 << 20)
    worker.forms, worker.results, worker.segments, worker.stages = {}, {}, {}, {}
    worker.busy, worker.process, worker.last_segment = False, None, 0
    worker.control, handed = socket.socketpair()
    (theirs, ours), (back, answers) = os.pipe(), os.pipe()
    alive, lifeline = os.pipe()
    worker.close_lifeline = weakref.finalize(worker, os.close, lifeline)
    page = memoryview(worker.arena.map)[CONTROL:CONTROL + PAGE]
    worker.link = Link(back, ours, page, first=True)
    other = Link(theirs, answers, page, first=False)
    yield worker, other
    worker.close()
    other.close()
    handed.close()
    os.close(alive)


def call(worker: Worker, seconds: float = 5.0) -> object:
    return worker.call("fake.rms_norm", (torch.ones(4, 64), None, 1e-6), (), seconds)


GARBLED = {
    "no JSON": (RESULT, FORM + b"nope"), "half a number": (RESULT, b"\0"),
    "a form never described": (RESULT, b"\x09\0\0\0"),
    "not a dtype": (RESULT, of_tensor("Tensor", [4, 64], [64, 1], 1024)),
    "no such dtype": (RESULT, of_tensor("nothing", [4, 64], [64, 1], 1024)),
    "more elements than bytes": (RESULT, of_tensor("float32", [4, 65], [64, 1], 1024)),
    "a negative stride": (RESULT, of_tensor("float32", [4, 64], [-64, 1], 1024)),
    "negative bytes": (RESULT, of_tensor("float32", [4, 64], [64, 1], -1024)),
    "2**42 bytes": (RESULT, of_tensor("float32", [2**40], [1], 2**42)),
    "a size that is no number": (RESULT, of_tensor("float32", [True, 64], [64, 1], 256)),
    "no tensor in it": (RESULT, FORM + b'["tensor", []]'),
    "another kind": (RESULT, FORM + b'["bomb", []]'),
    "nested": (RESULT, FORM + b'["tuple",' + b"[" * 900 + b"]" * 900 + b"]"),
    "an error without a kind": (FAULT, b"{}"), "an error in no text": (FAULT, b"\xff"),
    "an error with half a reason": (FAULT, json.dumps(
        {"kind": "refused", "message": "m", "type": "t", "reason": {"x": 1},
         "traceback": ""}).encode()),
    "another frame": (99, b""), "a list": (FAULT, b"[]")}


@pytest.mark.parametrize("answer", GARBLED.values(), ids=GARBLED)
def test_what_is_no_answer_stops_the_worker(ends, answer):
    worker, other = ends
    other.send(*answer)
    with pytest.raises(WorkerLost, match=r"cannot be read.*so it was stopped.*worker of garbled"):
        call(worker)
    assert worker.link.reading == -1 and worker.arena.fd == -1     # nothing of it is used again


@pytest.mark.parametrize("size", [0, 7, 2**63])
def test_a_frame_that_cannot_be_one(ends, size):
    worker, other = ends
    other.out[LENGTH] = size
    other.out[POSTED] = 1
    with pytest.raises(WorkerLost, match=f"a frame of {size} bytes"):
        call(worker)


def test_a_frame_that_says_it_is_4_gb(ends):
    worker, other = ends
    other.out[PIPED] = 1
    os.write(other.writing, HEADER.pack(RESULT, 0xffffffff))
    with pytest.raises(WorkerLost, match="a frame of 4294967295 bytes"):
        call(worker)


def test_half_a_frame_is_not_waited_for_longer_than_the_limit(ends):
    worker, other = ends
    other.out[PIPED] = 1
    os.write(other.writing, HEADER.pack(RESULT, 1000) + b"abc")
    with pytest.raises(WorkerTimeout, match=r"no answer within 0\.05 s"):
        call(worker, 0.05)


def test_a_result_that_has_no_room_is_out_of_memory(ends):
    """The worker is told so, and what it then answers counts; it stays."""
    worker, other = ends
    other.announce(NEED, b"\xff" * 8)
    other.announce(FAULT, json.dumps(
        {"kind": "memory", "message": "no room", "type": "MemoryError", "traceback": ""}).encode())
    with pytest.raises(MemoryError, match="no room"):
        call(worker)
    assert worker.link.reading >= 0


@pytest.mark.parametrize("names, error", [
    (b'["x", "y=print()"]', WorkerFault), (b'{"x": 1}', None), (b"3", WorkerFault),
    (b'["x", 3]', WorkerFault), (b"nope", WorkerFault)])
def test_parameters_become_text_only_if_they_are_names(ends, names, error):
    worker, other = ends
    other.send(LOADED, names)
    if error is None:
        assert worker.load({"id": "a", "module": "m"}) == ("x",)
        return
    with pytest.raises(error, match="cannot be read"):
        worker.load({"id": "a", "module": "m"})


def test_a_worker_that_is_gone_before_it_is_asked_anything_new(ends):
    worker, other = ends
    other.close()
    with pytest.raises(WorkerLost, match="it was stopped"):
        call(worker)                                       # the form cannot be described


def test_a_worker_that_is_gone_before_it_loads(ends):
    worker, other = ends
    other.close()
    with pytest.raises(WorkerLost, match="it was stopped"):
        worker.load({"id": "a", "module": "m" * 4000})     # goes through the pipe


def test_a_load_that_fails_for_no_known_reason(ends):
    worker, other = ends
    other.send(FAULT, json.dumps({"reason": None, "type": "OSError", "message": "gone"}).encode())
    with pytest.raises(LoadFailed, match="OSError: gone"):
        worker.load({"id": "a", "module": "m"})


def test_specs_that_were_made_are_read_again():
    for t in (torch.ones(4, 64), torch.ones(1, 8).expand(4, 8), torch.ones(0, 8), torch.ones(()),
              torch.ones(8, 4).T):
        spec = Spec.of(t)
        assert Spec.from_json(json.loads(json.dumps(spec))) == spec
    made = Results.of("tuple", [Spec.of(torch.ones(3)), (7,)])
    assert Results.from_json(made.to_json()) == made
