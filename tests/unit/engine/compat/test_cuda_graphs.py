"""Captures and replays, with a stand-in for torch's graphs: the real ones are in tests/gpu."""

from typing import Any

import pytest
import torch

from nbdist.engine.compat import cuda_graphs


class Graph:
    """Stands for `torch.cuda.CUDAGraph`: captures nothing, and replays what it is told to."""

    ends: Any = None
    runs: Any = staticmethod(lambda: None)

    def capture_begin(self) -> None:
        pass

    def capture_end(self) -> None:
        if self.ends is not None:
            raise self.ends

    def replay(self) -> None:
        self.runs()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> cuda_graphs.CudaGraphs:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (Graph,), dict(vars(Graph))))
    made = cuda_graphs.CudaGraphs()
    made.install()
    return made


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)


def test_a_captured_step_calls_no_hook_and_each_replay_calls_all(
    graphs: cuda_graphs.CudaGraphs,
) -> None:
    calls: list[str] = []
    before, _ = graphs.before_steps(lambda *_: calls.append("before"))
    after, _ = graphs.after_steps(lambda *_: calls.append("after"))
    opt, graph = optimizer(), torch.cuda.CUDAGraph()
    graph.capture_begin()
    assert graphs.is_capturing
    before(opt, (opt,), {})
    after(opt, (opt,), {})
    graph.capture_end()
    assert not graphs.is_capturing
    assert calls == []
    type(graph).runs = staticmethod(lambda: calls.append("replay"))
    graph.replay()
    graph.replay()
    assert calls == 2 * ["before", "replay", "after"]
    assert graphs.replays == 2


def test_a_replay_gives_the_captured_loss_while_somebody_holds_it(
    graphs: cuda_graphs.CudaGraphs,
) -> None:
    noted: list[float] = []
    graphs.note_loss = lambda loss: noted.append(loss.item())
    step, _ = graphs.before_steps(lambda *_: None)
    opt, graph, loss = optimizer(), torch.cuda.CUDAGraph(), torch.ones(())
    graph.capture_begin()
    graphs.note_captured_loss(loss)
    step(opt, (opt,), {})
    graph.capture_end()
    graph.replay()
    loss.fill_(0.5)
    graph.replay()
    del loss
    graph.replay()
    assert noted == [1.0, 0.5]


def test_a_graph_without_a_step_is_counted_and_calls_no_hook(
    graphs: cuda_graphs.CudaGraphs,
) -> None:
    calls: list[str] = []
    graphs.before_steps(lambda *_: calls.append("before"))
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()
    assert (calls, graphs.replays) == ([], 1)


def test_a_capture_that_fails_is_over_and_holds_nothing(
    graphs: cuda_graphs.CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    step, _ = graphs.before_steps(lambda *_: calls.append("before"))
    opt, graph = optimizer(), torch.cuda.CUDAGraph()
    graph.capture_begin()
    step(opt, (opt,), {})
    error = RuntimeError("operation failed due to a previous error during capture")
    monkeypatch.setattr(type(graph), "ends", error)
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    assert not graphs.is_capturing
    graph.replay()
    assert calls == []


def test_a_capture_that_no_cell_has_ended_is_forgotten_with_the_next(
    graphs: cuda_graphs.CudaGraphs,
) -> None:
    torch.cuda.CUDAGraph().capture_begin()
    graphs.begin_cell()
    assert not graphs.is_capturing


def test_this_torch_has_what_is_wrapped() -> None:
    assert cuda_graphs.check() == []
