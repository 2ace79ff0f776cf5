import threading
from typing import Any

import torch

from nbdist.engine.kernel import backward_threads
from tests import bare_thread

FILE = "/tmp/ipykernel_1/cell.py"
CELL = "# a cell\nloss = (weight * 2).sum()\nrun(loss)\n"


def _seen(run: Any) -> tuple[bool, bool, Any]:
    """Return whether a hook ran on the main thread, whether it was the main one's, and where."""
    seen: list[tuple[bool, bool, Any]] = []
    weight = torch.ones(3, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        seen.append((is_main, backward_threads.is_mains(), backward_threads.place_of_call()))

    weight.register_post_accumulate_grad_hook(hook)
    exec(compile(CELL, FILE, "exec"), {"weight": weight, "run": run})
    (found,) = seen
    return found


def test_a_thread_of_autograds_pool_works_for_the_main_one_at_the_line_of_its_backward() -> None:
    assert _seen(lambda loss: bare_thread.nested(loss.backward)) == (False, True, (FILE, 3))


def test_a_bare_thread_works_for_the_main_one_at_the_line_of_its_backward() -> None:
    bare_thread.install()
    try:
        assert _seen(torch.Tensor.backward) == (False, True, (FILE, 3))
    finally:
        bare_thread.remove()


def test_gradients_without_a_call_of_backward_are_the_main_threads_too() -> None:
    weight = torch.ones(3, requires_grad=True)
    seen: list[bool] = []
    middle = weight * 2
    middle.register_hook(lambda _: seen.append(backward_threads.is_mains()))
    bare_thread.install()
    try:
        torch.autograd.grad(middle.sum(), weight)
    finally:
        bare_thread.remove()
    assert seen == [True]


def test_a_backward_that_a_program_runs_on_a_thread_of_its_own_is_not_the_main_ones() -> None:
    def on_a_thread(loss: torch.Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    is_main, is_mains, _ = _seen(on_a_thread)
    assert (is_main, is_mains) == (False, False)


def test_outside_of_a_backward_a_thread_without_a_cell_is_nowhere() -> None:
    found: list[Any] = []

    def run() -> None:
        found.append((backward_threads.is_mains(), backward_threads.place_of_call()))

    exec(
        compile("\nthread.start(); thread.join()", FILE, "exec"),
        {"thread": threading.Thread(target=run)},
    )
    assert found == [(False, None)]
