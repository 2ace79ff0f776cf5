import pickle

from nbdist.engine.data.position.passes import PassLog, Position


class Loops:
    """Loops over one loader of 100 samples, 10 a batch, as `data.Loader` tells them."""

    def __init__(self) -> None:
        self.trail = PassLog(Position(0, 0), 1)
        self.epoch = self.consumed = self.given = 0
        self.lives = False

    def begin(self) -> None:
        self.consumed = self.given = 0
        self.lives = True
        self.trail.begin_pass(Position(self.epoch, 0), lambda: self.lives)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.batch()
            self.boundary()

    def batch(self) -> None:
        self.consumed += 10
        self.given += 1
        self.trail.give()

    def boundary(self) -> None:
        self.trail.commit(Position(self.epoch, self.consumed), self.given, False)

    def end(self) -> None:
        self.lives = False
        self.epoch, self.consumed, self.given = self.epoch + 1, 0, 0
        self.trail.end_pass()


def test_the_pass_that_failed_goes_on_after_the_last_boundary() -> None:
    loops = Loops()
    loops.begin()
    loops.train(3)
    loops.batch()  # lost

    assert loops.trail.plan() == [Position(0, 30)]
    assert loops.trail.committed.position == Position(0, 30)


def test_passes_that_were_over_get_nothing_when_the_cell_runs_again() -> None:
    loops = Loops()
    loops.begin()
    loops.train(10)
    loops.end()
    loops.begin()
    loops.train(2)

    assert loops.trail.plan() == [None, Position(1, 20)]


def test_a_fault_after_the_last_step_of_a_pass_leaves_nothing_of_it() -> None:
    loops = Loops()
    loops.begin()
    loops.train(10)
    loops.end()

    assert loops.trail.plan() == [Position(0, 100)]


def test_a_look_at_a_batch_is_taken_again_where_it_was_taken() -> None:
    loops = Loops()
    loops.begin()
    loops.batch()
    loops.lives = False  # next(iter(loader))
    loops.begin()
    loops.train(2)

    assert loops.trail.plan() == [Position(0, 0), Position(0, 20)]


def test_a_pass_is_done_once_a_step_was_made_after_its_end() -> None:
    loops = Loops()
    loops.begin()
    loops.train(10)
    loops.end()
    loops.boundary()  # of another loader's loop

    assert loops.trail.plan() == [None, Position(1, 0)]


def test_a_pass_that_was_left_is_done_once_another_loader_is_trained_on() -> None:
    loops = Loops()
    loops.begin()
    loops.train(3)
    loops.trail.end_left()  # the other's loop begins within this one
    loops.boundary()
    assert loops.trail.plan() == [Position(0, 30)]

    loops.lives = False
    loops.trail.end_left()
    assert loops.trail.plan() == [Position(0, 30)]  # until the other's first step
    loops.boundary()
    assert loops.trail.plan() == [None, Position(1, 0)]


def test_looks_after_a_pass_are_taken_again_where_another_loader_is_trained_on_since() -> None:
    loops = Loops()
    loops.begin()
    loops.train(10)
    loops.end()
    loops.begin()
    loops.batch()
    loops.lives = False  # next(iter(loader))
    loops.trail.end_left()
    loops.boundary()
    assert loops.trail.plan() == [None, Position(1, 0)]

    loops.begin()
    loops.batch()
    loops.end()
    loops.boundary()
    assert loops.trail.plan() == [None, Position(1, 0), Position(1, 0), Position(2, 0)]


def test_what_a_fault_has_lost_is_no_pass_of_the_boundary() -> None:
    loops = Loops()
    loops.begin()
    loops.train(10)
    loops.end()
    loops.boundary()
    boundary = loops.trail.committed
    loops.begin()
    loops.batch()  # lost
    loops.trail.forget_after(boundary)
    loops.epoch, loops.consumed, loops.given = 1, 0, 0
    loops.boundary()  # noted once more, before the cell is run again

    assert loops.trail.plan() == [None, Position(1, 0)]


def test_loops_without_a_step_begin_as_usual() -> None:
    loops = Loops()
    loops.begin()
    for _ in range(10):
        loops.batch()
    loops.end()
    loops.boundary()

    assert loops.trail.plan() == []


def test_after_going_back_beyond_the_cell_the_first_loop_begins_at_that_place() -> None:
    loops = Loops()
    loops.begin()
    loops.train(2)
    earlier = loops.trail.committed
    loops.trail.begin_cell(Position(0, 20), 2, False, 2)
    loops.begin()
    loops.train(1)
    loops.trail.committed = earlier

    assert loops.trail.plan() == [Position(0, 20)]


def test_a_loader_that_a_cell_took_nothing_from_does_not_go_back_beyond_it() -> None:
    loops = Loops()
    loops.begin()
    loops.train(2)
    earlier = loops.trail.committed
    loops.train(3)
    loops.trail.begin_cell(Position(0, 50), 5, False, 2)

    assert not loops.trail.goes_back_to(earlier)
    assert loops.trail.goes_back_to(loops.trail.committed)
    loops.begin()
    assert loops.trail.goes_back_to(earlier)


def test_a_trail_travels_without_its_loop() -> None:
    loops = Loops()
    loops.begin()
    loops.train(3)

    assert pickle.loads(pickle.dumps(loops.trail)).plan() == [Position(0, 30)]
