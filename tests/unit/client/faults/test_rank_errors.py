"""What the notebook says when a cell fails on some ranks."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import ipykernel
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import nbdist
from nbdist.client.faults.advice import A_CELL, Advice, AdviceKind, WhatRan
from nbdist.client.faults.failures import (
    Death,
    Failure,
    collective_of,
    is_consequence,
    place_of,
    plain,
)
from nbdist.client.faults.rank_errors import beside_interrupt, interrupted, rank_error
from nbdist.client.faults.rank_state import Inactive
from nbdist.shared.errors import RankError
from nbdist.shared.gpu_errors import explain
from nbdist.shared.processes.ended import Ended, EndKind
from tests.unit.shared.test_gpu_errors import ASSERT, EMBEDDING

INSTALLED = sysconfig.get_path("purelib")
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:7064. This is typically caused by a remote worker crashing. Check the logs of "
    "the remote worker before reporting an error. GLHF! 🏖️"
)
PAIR = (
    "[enforce fail at /x/gloo/gloo/transport/tcp/pair.cc:801] state_ >= CONNECTED. 1 vs 4. "
    "Pair is not connected ([127.0.0.1]:19359$2 <--> [none])"
)
BARRIER = (
    "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for "
    "send/recv from rank 0. Please check rank 0 logs for faulty rank."
)
STORE = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """IPython as a rank has it; the singleton, for tracebacks ask for it by that way."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.warn_venv = False  # of whoever runs the tests in another one
    yield InteractiveShell.instance(config=config, colors="linux")
    InteractiveShell.clear_instance()


@pytest.fixture
def run(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Return a function that fails for real in IPython and gives what a rank would reply."""

    def fail(rank: int, source: str, **more: object) -> Failure:
        shell.execution_count = 7
        done = shell.run_cell(source, store_history=True)
        error = done.error_before_exec or done.error_in_exec
        assert error is not None
        lines = shell.InteractiveTB.structured_traceback(
            type(error), error, error.__traceback__, tb_offset=1
        )
        capsys.readouterr()
        return Failure(rank, type(error).__name__, str(error), tuple(lines), **more)  # type: ignore[arg-type]

    return fail


def raised(
    rank: int, text: str, *, line: int = 3, name: str = "ValueError", order: float = 0.0
) -> Failure:
    frame = f"Cell In[7], line {line}\n      1 x = 1\n----> {line} f(x)\n"
    return Failure(rank, name, text, (frame, f"{name}: {text}"), order)


def freed(rank: int, call: str = "dist.all_reduce(x)", **more: object) -> Failure:
    frame = f"Cell In[7], line 5\n----> 5 {call}\n"
    library = f"File {INSTALLED}/torch/distributed/distributed_c10d.py:99, in all_reduce()\n"
    return Failure(rank, "RuntimeError", GLOO, (frame, library), **more)  # type: ignore[arg-type]


def text(error: RankError) -> str:
    return plain(str(error))


def test_a_real_error_is_told_with_its_rank_its_line_and_its_traceback(run) -> None:  # type: ignore[no-untyped-def]
    failure = run(2, "def pick(x):\n    return x[512]\n\npick([1])")
    error = rank_error([failure], asked=range(4), where={2: "node-b, cuda:0"})
    shown = text(error).split("\n")
    assert shown[0] == "1 of 4 ranks failed."
    assert shown[1] == (
        "  rank 2 (node-b, cuda:0)  cell 7, line 2  IndexError: list index out of range"
    )
    assert shown[3] == "rank 2:"
    assert shown[4] == "Cell In[7], line 4"
    assert "----> 2     return x[512]" in shown
    assert "IndexError: list index out of range" in shown
    assert error.failures == {2: ("IndexError", "list index out of range")}


def test_a_chained_error_keeps_its_cause(run) -> None:  # type: ignore[no-untyped-def]
    source = "try:\n    1/0\nexcept Exception as e:\n    raise ValueError('x') from e"
    shown = text(rank_error([run(0, source)], asked=[0]))
    assert "ZeroDivisionError: division by zero" in shown
    assert "direct cause" in shown
    assert shown.startswith("rank 0 failed.\n  rank 0  cell 7, line 4  ValueError: x\n")


def test_an_error_inside_a_library_is_placed_at_the_users_own_line(run) -> None:  # type: ignore[no-untyped-def]
    assert place_of(run(0, "import json\n\njson.loads('{')")) == "cell 7, line 3"


def test_peers_that_were_freed_take_one_line_and_the_cause_comes_first() -> None:
    failures = [
        freed(0, order=2.0),
        raised(1, "boom", order=1.0),
        freed(2, order=3.0),
        freed(3, "loss.backward()", order=3.0),
    ]
    error = rank_error(failures, asked=range(4))
    shown = text(error)
    assert shown.startswith(
        "1 of 4 ranks failed; ranks 0, 2 were released while waiting in all_reduce; "
        "rank 3 was released while waiting in backward.\n  rank 1  cell 7, line 3  ValueError: boom"
    )
    assert "gloo" not in shown
    assert set(error.failures) == {0, 1, 2, 3}


def test_equal_errors_are_told_once_for_all_their_ranks() -> None:
    shown = text(rank_error([raised(r, "boom") for r in range(4)], asked=range(4)))
    assert shown.startswith("4 of 4 ranks failed.\n  ranks 0-3  cell 7, line 3  ValueError: boom")
    assert shown.count("----> 3 f(x)") == 1


def test_errors_that_differ_only_by_the_ranks_own_number_are_one_group() -> None:
    failures = [raised(r, f"rank {r} found a nan at 0x7f{r}") for r in range(3)]
    shown = text(rank_error(failures, asked=range(3)))
    assert "  ranks 0-2  cell 7" in shown
    assert "ranks 0-2 (traceback from rank 0):" in shown


def test_equal_texts_stay_one_group_though_they_hold_some_ranks_number() -> None:
    failures = [raised(r, "expected 1, got 2") for r in range(3)]
    assert "  ranks 0-2  " in text(rank_error(failures, asked=range(3)))


def test_errors_at_different_lines_are_told_apart_in_the_order_they_happened() -> None:
    failures = [raised(0, "late", line=9, order=2.0), raised(1, "early", line=2, order=1.0)]
    shown = text(rank_error(failures, asked=[0, 1]))
    assert shown.index("early") < shown.index("late")


def test_a_rank_that_called_exit_is_said_in_words() -> None:
    failure = Failure(1, "SystemExit", "3", ("Cell In[7], line 2\n----> 2 sys.exit(3)\n",))
    shown = text(rank_error([failure, freed(0)], asked=[0, 1]))
    assert "  rank 1  cell 7, line 2  called sys.exit(3)" in shown
    assert "---->" not in shown


def test_advice_on_what_was_lost_does_not_say_that_it_is_kept() -> None:
    failures = [raised(0, "shards", name="LostStateError"), raised(1, "x", name="PlaceholderError")]
    error = rank_error(failures, asked=[0, 1])
    assert error.do.startswith("run the cells that create what is lost again (if a cell checks")
    assert "every rank" not in text(error)


def test_a_dead_rank_is_the_cause_and_its_last_words_are_told() -> None:
    death = Death(1, Ended.from_status(-11), words=("Fatal Python error: Segmentation fault",))
    do = Advice(AdviceKind.RETRY, "%dist retry")
    error = rank_error([freed(0), freed(2)], asked=range(3), deaths=[death], do=do)
    assert "1 of 3 ranks failed; ranks 0, 2 were released" in error.what
    assert "  rank 1 died: killed by SIGSEGV" in error.what
    assert "rank 1 wrote last:\nFatal Python error: Segmentation fault" in error.what
    assert error.do == "%dist retry"
    assert error.failures[1] == ("Died", "killed by SIGSEGV")
    assert error.causes == ("rank 1 died: killed by SIGSEGV",)


def test_a_rank_that_died_of_a_kernels_assertion_is_told_with_it_and_not_to_be_retried() -> None:
    death = Death(1, Ended.from_status(-6), place="cell 7, line 5", gpu=explain(EMBEDDING))
    error = rank_error(
        [freed(0)], asked=[0, 1], deaths=[death], otherwise=A_CELL.retry, replaced=[1]
    )
    assert error.causes == (
        (
            "rank 1 died: killed by SIGABRT in cell 7, line 5: "
            "Assertion `srcIndex < srcSelectDimSize` failed"
        ),
    )
    assert error.why.startswith("An index is out of range in an embedding")
    assert error.do == "fix the cell and run it again."


def test_ranks_that_died_of_different_assertions_are_told_apart() -> None:
    other = explain(EMBEDDING.replace("srcIndex < srcSelectDimSize", "t >= 0 && t < n_classes"))
    deaths = [
        Death(0, Ended.from_status(-6), gpu=explain(EMBEDDING)),
        Death(1, Ended.from_status(-6), gpu=other),
    ]
    error = rank_error([], asked=range(2), deaths=deaths)
    assert len(error.causes) == 2
    assert "an embedding" in error.why
    assert "A class label" in error.why


def test_a_rank_that_can_make_no_cuda_call_is_to_be_restarted() -> None:
    frame = "Cell In[7], line 3\n----> 3 loss.item()\n"
    traceback = (frame, f"AcceleratorError: {ASSERT}", f"AcceleratorError: {ASSERT}")
    one = Failure(1, "AcceleratorError", ASSERT, traceback, gpu=explain(ASSERT, EMBEDDING))
    error = rank_error([one, freed(0)], asked=range(2))
    assert (
        "  rank 1  cell 7, line 3  AcceleratorError: CUDA error: device-side assert" in error.what
    )
    assert "triggered: Assertion `srcIndex < srcSelectDimSize` failed" in error.what
    assert "CUDA_LAUNCH_BLOCKING" not in str(error)
    assert error.do == (
        "%dist restart -r 1    (every CUDA call of the old process fails), then fix the cell and "
        "run it again."
    )
    all_ranks = rank_error([one], asked=[1], in_loops=True)
    assert all_ranks.do.endswith("run it again, after those that make what it uses.")
    replaced = rank_error([one, freed(0)], asked=range(2), replaced=[1])
    assert replaced.do == "fix the cell and run it again."


def test_an_error_of_nccl_has_one_sentence_and_one_thing_to_do() -> None:
    text = "NCCL error in: x.cpp:1, invalid usage\nLast error:\nDuplicate GPU detected : rank 1"
    failures = [
        Failure(r, "DistBackendError", text, ("f", text), gpu=explain(text)) for r in range(2)
    ]
    error = rank_error(failures, asked=range(2), otherwise=A_CELL.retry)
    assert "invalid usage: Duplicate GPU detected" in error.causes[0]
    assert error.why == "Two ranks have the same GPU, which NCCL refuses."
    assert error.do.startswith("%dist start with as many ranks as there are GPUs")


def test_an_unknown_error_of_cuda_gives_torchs_advice_once() -> None:
    text = ASSERT.replace("device-side assert triggered", "something new")
    frames = ("Cell In[7], line 3\n----> 3 f(x)\n", text, f"RuntimeError: {text}")
    error = rank_error([Failure(0, "RuntimeError", text, frames)], asked=[0])
    assert str(error).count("CUDA_LAUNCH_BLOCKING") == 1


def test_when_all_timed_out_in_a_collective_that_is_the_news() -> None:
    late = (
        "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"
    )
    failures = [raised(0, late, name="RuntimeError"), raised(2, late, name="RuntimeError")]
    shown = text(rank_error(failures, asked=range(3)))
    assert shown.startswith("2 of 3 ranks failed.\n  ranks 0, 2  cell 7, line 3  RuntimeError: ")


def test_ranks_that_were_interrupted_because_another_failed_are_not_causes() -> None:
    stopped = Failure(1, "KeyboardInterrupt", "", (), order=2.0)
    shown = text(rank_error([raised(0, "boom"), stopped], asked=[0, 1]))
    assert shown.startswith("1 of 2 ranks failed; rank 1 was interrupted.")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RuntimeError", GLOO),
        ("DistNetworkError", STORE),
        ("torch.distributed.DistStoreError", "wait timeout after 3000ms, keys: /nokey"),
        ("RuntimeError", PAIR),
        ("RuntimeError", "Application timeout caused pair closure"),
        ("RuntimeError", BARRIER),
        ("DistBackendError", "NCCL communicator was aborted on rank 0."),
        ("ReleasedError", "this rank aborted its collectives, because another rank failed"),
    ],
)
def test_what_torch_says_of_a_lost_peer_is_a_consequence(name: str, message: str) -> None:
    assert is_consequence(Failure(0, name, message))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ValueError", "Connection closed by peer [example.org]"),
        ("RuntimeError", "CUDA out of memory"),
        ("ConnectionResetError", "Connection reset by peer"),
    ],
)
def test_a_users_own_error_is_never_taken_for_a_consequence(name: str, message: str) -> None:
    assert not is_consequence(Failure(0, name, message))


def test_where_a_freed_rank_waited_is_read_from_its_own_line() -> None:
    assert collective_of(freed(0, "loss.backward()")) == "backward"
    assert collective_of(Failure(0, "RuntimeError", GLOO)) == "a collective"


@pytest.mark.parametrize(
    "folder", ["~/nbdist", "~/nbdist/engine", "~/my site-packages/torch", "/x/site-packages/nbdist"]
)
def test_frames_of_nbdist_and_its_carriers_are_cut_and_a_users_folder_is_not(folder: str) -> None:
    frames = (
        "Cell In[7], line 1\n----> 1 f()\n",
        f"File {ipykernel.__file__}:5, in g()\n----> 5 carrier()\n",
        f"File {Path(nbdist.__file__).parent}/engine/layout/spread.py:5, in g()\n----> 5 ours()\n",
        f"File {folder}/train.py:8, in f()\n----> 8 users()\n",
        "ValueError: x",
    )
    shown = text(rank_error([Failure(0, "ValueError", "x", frames)], asked=[0]))
    assert "carrier" not in shown
    assert "ours" not in shown
    assert "users()" in shown
    assert "  rank 0  train.py, line 8  ValueError: x" in shown


def test_the_text_stays_bounded_however_much_failed() -> None:
    frames = tuple(f"File /x/deep.py:{i}\n" + "y" * 10_000 for i in range(300))
    failures = [
        Failure(r, f"Error{r}", "m" * 1_000_000, (*frames, "m" * 1_000_000)) for r in range(64)
    ]
    error = rank_error(failures, asked=range(64))
    assert len(error.what) < 600_000
    assert "60 more groups" in error.what


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left", ""),
        ("unable to write to file </torch_1_2_0>: No space left on device (28)", ""),
        ("unable to mmap 8388608 bytes from file </torch_1_2_0>: Cannot allocate memory (12)", ""),
        ("DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that ...", ""),
        ("[Errno 28] No space left on device", "sl = self._semlock = _multiprocessing.SemLock("),
    ],
)
def test_a_full_dev_shm_is_recognised_in_all_that_is_said_of_it(text: str, frame: str) -> None:
    error = rank_error([Failure(0, "RuntimeError", text, (frame,))], asked=range(2))
    assert error.do.startswith("/dev/shm is full")


@pytest.mark.parametrize(
    "text",
    [
        "aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor",
        "aten.add_.Tensor: in-place operations that require placement changes are not supported.",
    ],
)
def test_a_method_that_finds_shards_is_told_who_gathers_them(text: str) -> None:
    error = rank_error([Failure(0, "RuntimeError", text)], asked=range(1))
    assert error.do.startswith("weights are shards here, and whole only while model(...) runs.")


def test_a_full_disk_is_not_taken_for_a_full_dev_shm() -> None:
    failure = Failure(0, "OSError", "[Errno 28] No space left on device", ("f.write(data)",))
    assert "/dev/shm" not in rank_error([failure], asked=range(2)).do


MISMATCH = (
    "Collective #3 of the default group (ranks 0-2) differs between ranks.\n"
    "Why: ranks 0, 2 call barrier, line 1; rank 1 calls all_reduce of 4 float32 (16 B), line 2.\n"
    "Do:  let all ranks of the group make the same calls."
)


@pytest.mark.parametrize("told", [(1,), (0, 2), (0, 1, 2)])
def test_a_mismatch_reads_alike_whoever_was_told_of_it_first(told: tuple[int, ...]) -> None:
    closed = "gloo/transport/tcp/pair.cc: Connection closed by peer"
    failures = [
        Failure(r, "MismatchError", MISMATCH, ("f",))
        if r in told
        else Failure(r, "RuntimeError", closed, ("f",))
        for r in range(3)
    ]
    error = rank_error(failures, asked=range(3), notes=["The process group was re-created."])
    what, why, do = MISMATCH.split("\n")
    assert error.what == f"{what}\nThe process group was re-created.\n{why}"
    assert error.do == do.removeprefix("Do:  ")


def test_the_advice_of_our_own_errors_is_given_once_and_last() -> None:
    own = Failure(0, "LayoutError", "It does not fit.\nWhy: too big\nDo:  make it smaller", ("f",))
    told = str(rank_error([own], asked=range(2)))
    assert told.count("make it smaller") == 1
    assert told.count("It does not fit.") == 1
    assert told.endswith("It does not fit.\nWhy: too big\nDo:  make it smaller")
    assert "\n\n" not in told


def test_errors_of_our_own_on_several_ranks_leave_no_gap_where_their_advice_stood() -> None:
    own = [
        Failure(0, "LayoutError", "It does not fit.\nDo:  make it smaller", ("f",)),
        Failure(1, "DataError", "No file.\nDo:  make it smaller", ("f",)),
    ]
    told = str(rank_error(own, asked=range(2), do=Advice(AdviceKind.FIX, "make it smaller")))
    assert told.endswith("DataError: No file.\nDo:  make it smaller")


def test_one_sentence_of_our_own_is_said_once() -> None:
    own = Failure(0, "LayoutError", "every is a number of steps, not 0.", ("frame",))
    assert str(rank_error([own], asked=range(2))).count("every is a number of steps") == 1


def test_a_deadlock_is_a_cause_too() -> None:
    freed = Failure(0, "RuntimeError", "this rank aborted its collectives")
    error = rank_error([freed], asked=[0, 1], because="rank 1 has finished the cell; rank 0 waits.")
    assert error.causes == ("rank 1 has finished the cell; rank 0 waits.",)


def test_an_interrupt_tells_what_had_failed_of_itself_and_not_what_follows_from_it() -> None:
    failed = [
        Failure(0, "ValueError", "no", order=3.0),  # after it: of what the interrupt did
        Failure(1, "RuntimeError", GLOO, order=1.0),
        Failure(2, "KeyboardInterrupt", "", order=1.0),
        Failure(3, "IndexError", "index 5", order=1.0),
    ]
    ended = [
        Death(4, Ended.from_status(-11), 1.5, ("Fatal Python error: Segmentation fault",)),
        Death(5, Ended.from_status(-9), 4.0),
    ]

    groups = beside_interrupt(failed, ended, killed=[5], at=2.0)
    told = interrupted(groups, asked=6, killed=[5], notes=["Rank 4 was replaced."])

    assert told.splitlines()[:4] == [
        (
            "All ranks have stopped. Rank 5 was killed, because the interrupt did not stop it. "
            "2 of 6 failed by themselves, not by the interrupt:"
        ),
        "  rank 3  IndexError: index 5",
        "  rank 4 died: killed by SIGSEGV",
        "Rank 4 was replaced.",
    ]
    assert told.endswith("rank 4 wrote last:\nFatal Python error: Segmentation fault")


def test_an_interrupt_of_a_cell_that_was_well_is_one_line() -> None:
    assert (
        interrupted([], asked=2, notes=["Formed anew."]) == "All ranks have stopped. Formed anew."
    )


def test_a_cell_that_has_left_loops_names_what_lets_them_go_on() -> None:
    failed = Failure(1, "ValueError", "bad sample")
    told = rank_error([failed], asked=range(2), in_loops=True).do
    assert told.startswith("fix the cell and run it again; all ranks kept their variables.")
    assert "With %%distributed --go-on" in told
    assert "unchanged: %dist retry" in told
    assert "start over" in told
    assert "--go-on" not in rank_error([failed], asked=range(2)).do


@pytest.mark.parametrize("kind", AdviceKind)
def test_the_kind_of_an_advice_decides_whether_loops_are_explained_and_its_words_do_not(
    kind: AdviceKind,
) -> None:
    failed = Failure(1, "ValueError", "bad sample")
    tells = kind in (AdviceKind.FIX, AdviceKind.RESTART)
    for words in ("do this.", "%dist retry, it starts over.", A_CELL.make_again().text):
        do = rank_error([failed], asked=range(2), in_loops=True, do=Advice(kind, words)).do
        assert (do == f"{words.rstrip('.')}. {A_CELL.loops()}") is tells
        assert (do == words) is not tells


def test_a_retry_that_an_error_of_data_asks_for_needs_no_word_of_loops() -> None:
    known = Failure(1, "DataError", "x is not there.\nDo:  put it back, then %dist retry")
    other = Failure(1, "DataError", "x is a tar.gz.\nDo:  write it again")
    assert rank_error([known], asked=range(2), in_loops=True).do == (
        "put it back, then %dist retry"
    )
    assert "--go-on" in rank_error([other], asked=range(2), in_loops=True).do


def test_an_aborted_communicator_is_retried_and_loops_are_not_explained() -> None:
    said = "NCCL communicator was aborted on rank 0."
    failed = Failure(0, "DistBackendError", said, gpu=explain(said))
    told = rank_error([failed], asked=range(2), in_loops=True).do
    assert told == "%dist retry runs the cell again."


def test_a_script_that_fails_is_fixed_in_its_file_and_run_by_dist_run() -> None:
    failed = Failure(1, "ValueError", "no data", ("File /work/beside.py:9, in load()",))
    told = rank_error([failed], asked=range(2), in_loops=True, ran=WhatRan("train.py")).do
    assert told.startswith(
        "fix line 9 of beside.py, then %dist run train.py again; all ranks kept their variables. "
    )
    assert "It starts over where it creates its optimizer" in told
    assert "nbdist.restore(missing_ok=True)" in told
    assert "cell" not in told
    assert "%%distributed" not in told


def test_a_script_that_refuses_its_words_is_not_to_be_fixed() -> None:
    refused = [Failure(rank, "SystemExit", "2") for rank in range(2)]
    told = rank_error(refused, asked=range(2), ran=WhatRan("train.py", words=("--lr", "x"))).do
    assert told.startswith("look at the words after train.py: sys.exit(2) is how argparse refuses")
    assert "fix" not in told
    for script, code in (
        (WhatRan("train.py"), "2"),
        (WhatRan("train.py", words=("--lr", "x")), "3"),
    ):
        told = rank_error([Failure(0, "SystemExit", code)], asked=range(2), ran=script).do
        assert told.startswith("fix train.py, then")


def test_a_script_is_run_again_with_the_words_that_it_had() -> None:
    module = WhatRan("train.py", words=("--lr", "1", "two words"), module="pkg.train")
    assert module.run == "%dist run -m pkg.train --lr 1 'two words'"
    assert WhatRan("train.py", words=("3",)).again() == "%dist run train.py 3 again"
    below = WhatRan("jobs/train.py")
    assert (below.run, below.name) == ("%dist run jobs/train.py", "train.py")


def test_a_script_that_was_interrupted_or_lost_a_rank_is_told_of_as_a_script() -> None:
    script = WhatRan("train.py")
    assert script.retry.text == "%dist retry runs train.py again."
    assert (
        "loaders" not in f"{script.retry.text} {A_CELL.retry.text}"
    )  # it says so where they have begun
    assert script.loops(unchanged=True).startswith("%dist run train.py again: it starts over")
    assert script.make_again().text.startswith("%dist run train.py again: what it creates itself,")
    assert Inactive("finished", ran=script).predicate(1) == "has finished train.py"
    assert Inactive("absent", "-r 0", script).predicate(2) == "are not in train.py (-r 0)"


def test_what_was_a_model_begins_anew_and_other_things_are_made_for_a_retry() -> None:
    model, file = (
        rank_error([Failure(1, ename, "gone")], asked=range(2), in_loops=True).do
        for ename in ("LostStateError", "PlaceholderError")
    )
    assert "then this one" in model
    assert "retry" not in model
    assert file.endswith("then %dist retry.")


def test_ranks_that_the_oom_killer_ends_twice_have_ended_alike() -> None:
    def error(held: str) -> RankError:
        ended = Ended(EndKind.OOM_KILLER, 9, detail=f"it held {held}")
        return rank_error([], asked=[0, 1], deaths=[Death(1, ended)])

    assert "it held 3.2 GB" in text(error("3.2 GB"))
    assert error("3.2 GB").causes == error("3.4 GB").causes
