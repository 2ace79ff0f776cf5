"""Which part of a step the main thread's time belongs to, on a clock of whole milliseconds."""

from typing import Any

import pytest

from nbdist.engine.training.parts import PartTimer, with_stream

MS = 1_000_000
TRAIN, CHECK = 1, 2  # loaders
ADAM, SGD = 11, 12  # optimizers


class Clock:
    """Drives the parts: each method does one thing for so many ms, of which some are blocked."""

    def __init__(self) -> None:
        self.parts = PartTimer()
        self.now = self.blocked = 0
        self.parts.begin(0)

    def run(self, ms: int, blocked: int = 0) -> None:
        self.now += ms * MS
        self.blocked += blocked * MS

    def fetch(self, ms: int, loader: int = TRAIN, *, may_train: bool = True) -> None:
        self.parts.fetch_began(self.now, self.blocked)
        self.run(ms)
        self.parts.fetch_ended(self.now, self.blocked, loader, may_train=may_train)

    def backward(self, ms: int, blocked: int = 0) -> None:
        self.parts.backward_began(self.now, self.blocked)
        self.run(ms, blocked)
        self.parts.backward_ended(self.now, self.blocked)

    def step(self, ms: int, optimizer: int = ADAM) -> bool:
        self.parts.optimizer_began(self.now, self.blocked, optimizer, has_closure=False)
        self.run(ms)
        return self.parts.optimizer_ended(self.now, self.blocked, optimizer)

    def close(self) -> dict[str, int]:
        """Return the step's parts in ms, those that are not 0, the sum left out."""
        told = self.parts.close(self.now, self.blocked)
        self.blocked = 0
        parts = ("compute_s", "comm_s", "data_s", "optimizer_s", "other_s")
        assert told["step_s"] == pytest.approx(sum(told[part] for part in parts), abs=1e-12)
        return {name[:-2]: round(1e3 * s) for name, s in told.items() if s and name != "step_s"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_plain_step_is_fetch_forward_backward_rest_optimizer_rest(clock: Clock) -> None:
    for _ in range(2):
        clock.fetch(3)
        clock.run(5)
        clock.backward(7)
        clock.run(11)  # clipping
        clock.step(13)
        told = clock.close()
        clock.run(17)  # logging, in the next step
    assert told == {
        "data": 3,
        "forward": 5,
        "backward": 7,
        "compute": 12,
        "optimizer": 13,
        "other": 28,
    }


def test_blocked_time_is_taken_out_of_the_part_it_fell_into(clock: Clock) -> None:
    clock.fetch(3)
    clock.run(5, blocked=2)
    clock.backward(10, blocked=4)
    clock.run(6, blocked=5)
    clock.step(1)
    assert clock.close() == {
        "data": 3,
        "forward": 5,
        "forward_comm": 2,
        "backward": 10,
        "compute": 9,
        "comm": 11,
        "optimizer": 1,
        "other": 1,
    }


def test_without_a_loader_forward_begins_where_the_optimizer_has_ended(clock: Clock) -> None:
    clock.run(4)
    clock.backward(5)
    clock.step(1)
    assert clock.close()["forward"] == 4


@pytest.mark.parametrize("waited", [0, 4])  # by itself, and under DDP, whose backward waits
def test_what_python_does_before_a_forward_is_compute_with_ddp_and_without(
    clock: Clock, waited: int
) -> None:
    clock.step(1)
    clock.close()
    clock.run(20)  # it sleeps, or augments
    clock.run(3)  # the model
    clock.backward(6, blocked=waited)
    clock.step(1)
    assert clock.close() == {
        "forward": 23,
        "backward": 6,
        "compute": 29 - waited,
        "optimizer": 1,
    } | ({"comm": waited} if waited else {})


def test_between_two_backwards_lies_a_forward_and_after_the_last_the_rest(clock: Clock) -> None:
    for _ in range(3):  # accumulation
        clock.fetch(2)
        clock.run(3)
        clock.backward(4)
        clock.run(1)
    clock.run(5)
    clock.backward(4)  # a second loss on the last batch
    clock.step(1)
    assert clock.close() == {
        "data": 6,
        "forward": 9 + 6,
        "backward": 16,
        "compute": 31,
        "optimizer": 1,
        "other": 2,
    }


def test_an_evaluation_is_other_with_its_loader_and_training_is_not(clock: Clock) -> None:
    def train() -> None:
        clock.fetch(2)
        clock.run(3)
        clock.backward(4)
        clock.step(1)

    for _ in range(2):
        train()
        told = clock.close()
        for _ in range(3):
            clock.fetch(10, CHECK)
            clock.run(10)
        clock.fetch(1, CHECK, may_train=False)
        clock.run(7)
    assert told["other"] == 68
    assert (told["data"], told["compute"]) == (2, 7)


def test_an_evaluation_before_the_first_step_does_not_make_its_loader_one_that_trains(
    clock: Clock,
) -> None:
    clock.fetch(10, CHECK)
    clock.run(10)
    clock.fetch(1, CHECK, may_train=False)
    clock.run(3)
    clock.backward(4)  # on tensors that no loader has given
    clock.step(1)
    assert clock.close() == {
        "forward": 3,
        "backward": 4,
        "compute": 7,
        "optimizer": 1,
        "other": 21,
    }


def test_an_evaluation_of_one_batch_without_gradients_is_other(clock: Clock) -> None:
    for _ in range(2):
        clock.fetch(2, CHECK, may_train=False)
        clock.fetch(3)
        clock.run(3)
        clock.backward(4)
        clock.step(1)
        told = clock.close()
    assert (told["data"], told["other"]) == (3, 2)


def test_batches_fetched_ahead_and_of_two_loaders_are_data(clock: Clock) -> None:
    clock.fetch(2)
    clock.fetch(2)  # ahead
    clock.run(3)
    clock.backward(4)
    clock.step(1)
    assert clock.close()["data"] == 4
    clock.fetch(5, CHECK)  # a second one that trains: one batch a step
    clock.fetch(2)
    clock.run(3)
    clock.backward(4)
    clock.step(1)
    assert clock.close()["data"] == 7


def test_optimizers_in_turn_and_within_each_other_are_optimizer(clock: Clock) -> None:
    clock.fetch(1)
    clock.run(2)
    clock.backward(3)
    assert clock.step(4, ADAM)
    clock.run(5)
    clock.backward(6)
    parts = clock.parts
    assert parts.optimizer_began(clock.now, 0, SGD, has_closure=False)
    clock.run(1)
    assert not clock.step(7, ADAM)  # a part of the other one's
    clock.run(1)
    assert parts.optimizer_ended(clock.now, 0, SGD)
    assert clock.close() == {
        "data": 1,
        "forward": 7,
        "backward": 9,
        "compute": 16,
        "optimizer": 13,
    }


def test_an_optimizer_within_backward_interrupts_it(clock: Clock) -> None:
    clock.run(1)
    clock.parts.backward_began(clock.now, 0)
    clock.run(2)
    clock.step(3)
    told = clock.close()
    assert told == {"forward": 1, "backward": 2, "compute": 3, "optimizer": 3}
    clock.run(4)
    clock.parts.backward_ended(clock.now, 0)
    clock.step(1)
    assert clock.close() == {"backward": 4, "compute": 4, "optimizer": 1}


def test_a_closure_is_forward_and_backward_and_the_optimizer_what_is_left(clock: Clock) -> None:
    parts = clock.parts

    def closure() -> None:
        parts.closure_began(clock.now, 0)
        clock.run(4)
        clock.backward(5)
        clock.run(1)
        parts.closure_ended(clock.now, 0)

    clock.fetch(2)
    clock.run(3)  # to the device
    parts.optimizer_began(clock.now, 0, ADAM, has_closure=True)
    for _ in range(2):
        closure()
        clock.run(6)
    parts.optimizer_ended(clock.now, 0, ADAM)
    assert clock.close() == {
        "data": 2,
        "forward": 11,
        "backward": 10,
        "compute": 21,
        "optimizer": 12,
        "other": 2,
    }


def test_gradients_that_came_without_a_backward_make_what_lies_before_them_forward(
    clock: Clock,
) -> None:
    clock.fetch(2)
    clock.run(5)
    clock.step(1)
    assert clock.close()["forward"] == 5
    clock.run(6)  # no loader any more
    clock.step(1)
    assert clock.close()["forward"] == 6
    clock.backward(1)
    clock.step(1, ADAM)
    clock.run(3)
    clock.step(1, SGD)  # the second of two: nothing was computed between
    assert clock.close()["other"] == 3


def test_a_step_that_raised_is_forgotten_with_the_next_batch(clock: Clock) -> None:
    clock.parts.optimizer_began(clock.now, 0, SGD, has_closure=False)
    clock.run(1)
    clock.fetch(2)
    clock.run(3)
    clock.backward(4)
    assert clock.step(5, ADAM)
    assert clock.close()["optimizer"] == 6


def test_blocked_time_found_out_late_does_not_make_a_part_negative(clock: Clock) -> None:
    clock.parts.backward_began(clock.now, 0)
    clock.run(2)
    clock.step(1)
    clock.close()
    clock.run(2)
    clock.blocked = 5 * MS
    clock.parts.backward_ended(clock.now, clock.blocked)
    clock.run(1)
    clock.step(1)
    told: dict[str, Any] = clock.close()
    assert told == {"backward": 2, "comm": 2, "optimizer": 1, "other": 1}


def test_what_the_compute_stream_waited_is_taken_out_of_where_the_host_waited_for_it() -> None:
    parts = {"step_s": 0.1, "compute_s": 0.06, "comm_s": 0.01, "other_s": 0.02, "data_s": 0.01}
    found = with_stream(parts, 35_000_000)
    assert found == pytest.approx(
        {"step_s": 0.1, "compute_s": 0.045, "comm_s": 0.045, "other_s": 0.0, "data_s": 0.01}
    )
    assert with_stream(parts, 0) == parts
    most = with_stream(parts, 10**12)
    assert (most["comm_s"], most["compute_s"], most["data_s"]) == (pytest.approx(0.09), 0.0, 0.01)
