"""Guard zones: a write outside of a buffer or into an input is seen and named, and guarded memory is as any other."""

from __future__ import annotations

import pytest
import torch

from k3dsl.autotune import candidate_run
from k3dsl.autotune.candidate_run import References, Request
from k3dsl.autotune.drawn import Drawn
from k3dsl.autotune.guards import Guards
from k3dsl.autotune.trial import Candidate, End
from k3dsl.runtime import executable

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (0, 4), ()])
def test_a_guarded_buffer_is_an_ordinary_one_that_holds_what_nobody_wants(dtype, shape):
    guards = Guards()
    x = guards.allocate("o", shape, dtype, CPU)
    assert (x.shape, x.dtype, x.is_contiguous()) == (torch.Size(shape), dtype, True)
    assert x.data_ptr() % 64 == 0  # as torch.empty gives it on a CPU
    if dtype.is_floating_point:
        assert x.isnan().all()
    else:
        assert (x == (1 if dtype is torch.bool else torch.iinfo(dtype).max)).all()
    x.fill_(1)
    assert guards.problem() is None


@pytest.mark.parametrize(
    ("offset", "says"), [(-1, "4 bytes before its start, the first 4 off"), (15, "4 bytes past its end")]
)
def test_one_element_outside_is_seen_with_the_buffers_name(offset, says):
    guards = Guards()
    guards.allocate("scratch", (8,), torch.float32, CPU)
    x = guards.allocate("state", (3, 5), torch.float32, CPU)
    torch.as_strided(x, (1,), (1,), x.storage_offset() + offset).fill_(0.5)
    assert f"it wrote outside of state: {says}" in guards.problem()


def test_inputs_keep_strides_and_values_and_are_watched():
    base = torch.arange(48.0).view(6, 8)
    given = {
        "rows": base[::2],
        "columns": base.t(),
        "same": base[:1].expand(4, 8),
        "none": None,
        "scale": 0.5,
        "empty": torch.empty(0, 3),
    }
    guards = Guards()
    held = guards.inputs(given, ("columns",))
    for name in ("rows", "columns", "same"):
        assert held[name].stride() == given[name].stride()
        assert torch.equal(held[name], given[name])
        assert held[name].data_ptr() != given[name].data_ptr()
    assert (held["none"], held["scale"]) == (None, 0.5)
    held["columns"].add_(1)
    assert guards.problem() is None
    held["rows"][0, 0] = -1
    assert guards.problem() == "it changed its input rows"


@pytest.mark.parametrize(("where", "says"), [(1, "past its end"), (-1, "before its start")])
def test_a_kernel_that_stores_astray_is_wrong_however_right_its_output(monkeypatch, where, says):
    run = executable.BoundLaunch._run_torch

    def astray(self, tensors, dims, scalars, stream=None):
        run(self, tensors, dims, scalars)
        o = tensors["o"]
        torch.as_strided(o, (1,), (1,), o.storage_offset() + (o.numel() if where > 0 else -1)).fill_(0)

    def judged(rows):
        candidate = Candidate("softmax", {"R": 8, "N": 64}, {}, {"rows": rows}, "torch")
        return candidate_run.run(candidate, Request(repeats=2, rep_ms=1), CPU, References(), Drawn(), lambda *_: None)

    assert judged(2).end is End.OK
    monkeypatch.setattr(executable.BoundLaunch, "_run_torch", astray)
    outcome = judged(4 if where > 0 else 8)  # knobs that nothing was built for yet
    assert outcome.end is End.WRONG, outcome
    assert "it wrote outside of o" in outcome.detail
    assert says in outcome.detail
