"""Steps on several streams: what waits for what, and that all of them fork from the caller's stream and join it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from k3dsl.errors import ArgumentError
from k3dsl.ir.symbols import Expr, Sym
from k3dsl.ops.registry import get_op
from k3dsl.runtime import lanes
from k3dsl.runtime.plan import Plan, Step


class Stream:
    """Stands for a torch stream: appends what is asked of it to a log."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.cuda_stream = name, log, name

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.what}")


class Event:
    """Remembers how far its stream was."""

    def record(self, stream: Stream) -> None:
        done = [entry for entry in stream.log if entry.startswith(f"{stream.name} runs")]
        self.what = done[-1].replace(" runs", "") if done else f"{stream.name} begin"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    entries: list[str] = []
    streams = {n: Stream(f"lane {n}", entries) for n in (-1, 0, 1)}
    monkeypatch.setattr(lanes, "_stream", lambda device, lane: streams[lane])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return entries


def run(steps: list[Step], log: list[str], broken: int | None = None) -> None:
    def enqueue(number: int, stream: Any) -> None:
        if number == broken:
            raise RuntimeError("no launch")
        log.append(f"{stream or 'lane 0'} runs {number}")

    lanes.Lanes(steps).run(torch.device("cuda", 0), [partial(enqueue, n) for n in range(len(steps))])


def test_a_step_waits_for_steps_of_other_lanes_and_the_caller_for_all(log: list[str]) -> None:
    run([Step(0), Step(1, lane=-1, after=(0,)), Step(0, lane=1), Step(1, lane=-1, after=(2, 1))], log)
    assert log == [
        "lane -1 waits for lane 0 begin",
        "lane 1 waits for lane 0 begin",
        "lane 0 runs 0",
        "lane -1 waits for lane 0 0",
        "lane -1 runs 1",
        "lane 1 runs 2",
        "lane -1 waits for lane 1 2",
        "lane -1 runs 3",
        "lane 0 waits for lane -1 3",
        "lane 0 waits for lane 1 2",
    ]


def test_a_thread_uses_its_events_again(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []

    def make() -> Event:
        made.append(Event())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", make)
    order = lanes.Lanes([Step(0), Step(1, lane=-1, after=(0,))])
    for _ in range(3):
        order.run(torch.device("cuda", 0), [lambda stream: None] * 2)
    first = len(made)
    thread = threading.Thread(target=order.run, args=(torch.device("cuda", 0), [lambda stream: None] * 2))
    thread.start()
    thread.join()
    assert (first, len(made)) == (4, 8)


def test_lanes_join_also_when_a_step_fails(log: list[str]) -> None:
    with pytest.raises(RuntimeError, match="no launch"):
        run([Step(0), Step(1, lane=-1, after=(0,))], log, broken=1)
    assert log[-1] == "lane 0 waits for lane -1 begin"


def test_steps_of_one_lane_need_no_events(log: list[str]) -> None:
    run([Step(0), Step(1, after=(0,))], log)
    assert log == ["lane 0 runs 0", "lane 0 runs 1"]
    assert not lanes.Lanes([Step(0), Step(1)]).several


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ((Step(0),), "no step runs launch scan"),
        ((Step(0), Step(1), Step(2), Step(1, {"first": Expr.of(1)})), "give it different dims"),
        ((Step(0, after=(1,)), Step(1), Step(2)), "come no earlier"),
        ((Step(0, after=(0,)), Step(1), Step(2)), "come no earlier"),
    ],
)
def test_steps_that_cannot_be_run_are_refused(steps: tuple[Step, ...], problem: str) -> None:
    plan = get_op("kda.forward").point({"T": 64, "H": 2}, {}).plan("torch")
    with pytest.raises(ArgumentError, match=problem):
        Plan(plan.op, plan.dims, plan.buffers, plan.launches, steps=steps).check()


def test_a_dim_that_steps_give_is_none_of_the_calls() -> None:
    plan = get_op("kda.forward").point({"H": 2}, {"slices": 4}, symbolic=True).plan("torch")
    assert {"first", "slice_chunks", "part"} <= {s.name for launch in plan.launches for s in launch.kernel.dims}
    assert {"first", "slice_chunks", "part"}.isdisjoint(plan.symbols())
    assert isinstance(plan.symbols()["T"], Sym)
