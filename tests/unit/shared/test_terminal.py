"""Terminals and the sockets of notebooks, without ranks."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbdist import cli
from nbdist.client.board import palette
from nbdist.client.board.past import Past
from nbdist.client.board.scene.look import look
from nbdist.client.cells.interrupts import Interrupts
from nbdist.client.session.terminal_requests import TerminalRequests
from nbdist.shared.errors import ClusterError, NBDistError, UsageError
from nbdist.shared.processes import terminal, user_socket
from tests.unit.client.board.board_data import analysis_of, cell_info, training


class FakeSession:
    """What a terminal asks for, without ranks."""

    describe = "2 ranks on cpu, gloo"

    def __init__(self) -> None:
        self.ends: list[TerminalRequests] = []
        self.may_stop = threading.Event()
        self.may_stop.set()
        self.boards: list[Past] = []

    def status(self) -> str:
        return "all idle"

    def stacks(self, ranks: str = "all") -> str:
        if ranks == "9":
            raise UsageError("There is no rank 9.", do="-r 0-1")
        if ranks == "x":
            raise RuntimeError("moved")
        return f"stacks of {ranks}"

    def checks(self) -> str:
        return "all silent"

    def board(self) -> Past:
        return self.boards.pop(0)

    def pause(self) -> str:
        return "Paused."

    def resume(self) -> str:
        return "Going on."

    def peek(self, expression: str) -> str:
        return f"{expression} is 3"

    def change(self, **values: Any) -> str:
        return f"changed {values}"

    def interrupt_and_stop(self) -> None:
        assert self.may_stop.wait(30)
        for requests in self.ends:
            requests.close()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder for sockets; short, for their paths are."""
    with tempfile.TemporaryDirectory(prefix="nb_", dir="/tmp") as folder:
        monkeypatch.setattr(user_socket, "own_folders", lambda: [Path(folder) / "sockets"])
        yield Path(folder) / "sockets"


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def requests(place: Path, session: FakeSession) -> Iterator[TerminalRequests]:
    listening = TerminalRequests(session, Path("/home/me/thesis"))
    session.ends.append(listening)
    yield listening
    listening.close()
    listening._thread.join(10)
    assert not listening._thread.is_alive()


def test_status_and_stacks_are_the_session_s_words(requests: TerminalRequests) -> None:
    assert terminal.status(None) == "all idle"
    assert terminal.status(os.getpid()) == "all idle"
    assert terminal.stacks(None, "0-1") == "stacks of 0-1"
    assert terminal.checks(None) == "all silent"
    (found,) = terminal.find()
    assert str(found) == f"kernel {os.getpid()}: 2 ranks on cpu, gloo, in /home/me/thesis"


def test_an_error_of_the_session_is_the_terminal_s(requests: TerminalRequests) -> None:
    with pytest.raises(ClusterError, match=r"There is no rank 9.\nDo:  -r 0-1"):
        terminal.stacks(None, "9")
    with pytest.raises(ClusterError, match="It failed: RuntimeError: moved"):
        terminal.stacks(None, "x")
    assert terminal.status(None) == "all idle"


def test_a_terminal_pauses_looks_into_changes_and_continues_a_training(
    requests: TerminalRequests, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["pause"], ["peek", "-w"], ["change", "lr=0.01", 'opt="sgd"'], ["continue"]):
        arguments = words if words[0] != "peek" else ["peek", "--", words[1]]
        assert cli.main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Paused.",
        "-w is 3",
        "changed {'lr': 0.01, 'opt': 'sgd'}",
        "Going on.",
    ]


def test_a_terminal_s_change_that_is_no_value_is_refused_in_its_words(
    requests: TerminalRequests,
) -> None:
    with pytest.raises(ClusterError, match=r"change takes KEY=VALUE, not 'lr'"):
        terminal.change(None, ["lr"])


def test_after_stop_nothing_listens_and_no_file_is_left(
    requests: TerminalRequests, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Stopped 2 ranks on cpu, gloo" in terminal.stop(None)
    assert list(place.iterdir()) == []

    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == (
        "ClusterError: None of your notebooks on this machine has a running cluster.\n"
        "Do:  %dist start in a notebook.\n"
    )


def test_status_answers_while_a_stop_takes_its_time(
    requests: TerminalRequests, session: FakeSession
) -> None:
    session.may_stop.clear()
    said: list[str] = []
    stops = [threading.Thread(target=lambda: said.append(terminal.stop(None))) for _ in range(2)]
    for stop in stops:
        stop.start()

    for _ in range(20):  # more than are answered at once
        assert terminal.status(None) == "all idle"
    assert said == []

    session.may_stop.set()
    for stop in stops:
        stop.join(30)
    assert len(said) == 2


def test_the_board_of_a_running_cell_is_its_words_and_its_picture(
    requests: TerminalRequests, session: FakeSession, tmp_path: Path
) -> None:
    scene = look(training(2, 60), cell_info(2), analysis_of(2, slow=1))
    scene = replace(scene, outcome="running")
    session.boards.append(Past(scene, palette.theme_named("auto"), elapsed_s=24.0))
    picture = tmp_path / "board.png"

    said, runs = terminal.board(None, "overview", picture)

    assert runs
    progress, verdict, sentence, *table = said.splitlines()
    assert progress.startswith("60 [00:24, ")
    assert "rank 1 is 48 % slower" in verdict
    assert sentence
    assert any(line.split()[:1] == ["rank"] for line in table)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_board_is_watched_until_its_cell_has_ended(
    requests: TerminalRequests,
    session: FakeSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(terminal, "_WATCH_S", 0.0)
    scene = look(training(2, 60), cell_info(2), analysis_of(2))
    for outcome, elapsed_s in (("running", 1.0), ("running", 2.0), ("finished", None)):
        now = Past(replace(scene, outcome=outcome), palette.theme_named("auto"), elapsed_s)
        session.boards.append(now)

    assert cli.main(["board", "step", "--watch"]) == 0

    said = capsys.readouterr().out
    heads = [said.index(head) for head in ("60 [00:01, ", "60 [00:02, ", "Step-time breakdown on")]
    assert heads == sorted(heads)
    assert session.boards == []


def test_a_view_that_is_none_and_a_picture_that_cannot_be_written_are_errors(
    requests: TerminalRequests, session: FakeSession, tmp_path: Path
) -> None:
    with pytest.raises(
        ClusterError, match=r"no view 'steps'.\nDo:  choose of overview, loss, step"
    ):
        terminal.board(None, "steps")
    scene = replace(look(training(2, 9), cell_info(2)), outcome="finished")
    session.boards.append(Past(scene, palette.theme_named("auto")))
    with pytest.raises(NBDistError, match=r"cannot be written to .*none/board.png"):
        terminal.board(None, "overview", tmp_path / "none" / "board.png")


def test_the_socket_s_folder_and_file_are_its_user_s_alone(
    requests: TerminalRequests, place: Path
) -> None:
    assert place.stat().st_mode & 0o777 == 0o700
    assert requests.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["open to a group", "a link"])
def test_a_folder_that_others_can_open_is_not_used(place: Path, how: str) -> None:
    if how == "a link":
        (place.parent / "elsewhere").mkdir(0o700)
        place.symlink_to(place.parent / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o750)
    with pytest.raises(PermissionError, match="can be opened by others"):
        TerminalRequests(FakeSession(), None)
    server = socket.socket(socket.AF_UNIX)
    with server:
        server.bind(str(place / "1.sock"))
        server.listen()
        assert terminal.find() == []


@pytest.mark.skipif(sys.platform != "linux", reason="who connects is told on Linux")
def test_another_user_is_told_nothing_and_tells_nothing(
    requests: TerminalRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.getuid()
    monkeypatch.setattr(user_socket, "is_private", lambda folder: True)
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(requests.path))
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(b'{"ask": "who"}\n')
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
    (found,) = terminal.find()
    assert "another user listens there" in found.trouble


@pytest.mark.parametrize(
    "question",
    [
        b"\n",
        b"[]\n",
        b"{\n",
        b'{"ask"',
        b"x" * 5000,
        b"[" * 4000 + b"\n",
        b'{"ask": "exec", "code": "1"}\n',
    ],
)
def test_what_is_no_question_is_not_answered_and_harms_nobody(
    requests: TerminalRequests, question: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(requests.path))
        connection.sendall(question)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert b"does not know" in (answer := connection.recv(4096)) or not answer
    assert terminal.status(None) == "all idle"


def test_the_socket_of_a_killed_kernel_is_removed_and_others_files_are_not(place: Path) -> None:
    place.mkdir(0o700)
    dead, file, named = place / "99999999.sock", place / "7.sock", place / "mine.sock"
    for path in (dead, named):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    file.write_text("no socket")

    assert terminal.find() == []
    assert sorted(place.iterdir()) == sorted([file, named])


def test_a_kernel_that_does_not_answer_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_FIND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(terminal, "_ASK_TIMEOUT_S", 0.05)
    server, path = user_socket.listen(4321)
    with server:
        (found,) = terminal.find()
        assert str(found) == "kernel 4321: does not answer (timed out)"
        with pytest.raises(ClusterError, match=r"Kernel 4321 does not answer.\nWhy: timed out"):
            terminal.status(None)
    path.unlink()


def test_of_several_clusters_one_is_chosen_by_its_kernel() -> None:
    found = [
        terminal.Found(10, Path("10.sock"), "/home/me/a", "2 ranks"),
        terminal.Found(20, Path("20.sock"), "/home/me/b", "4 ranks"),
    ]
    assert terminal.choose(found, 20) is found[1]
    with pytest.raises(ClusterError, match=r"2 clusters[^$]*20: 4 ranks, in /home/me/b[^$]*--pid"):
        terminal.choose(found, None)
    with pytest.raises(ClusterError, match=r"Kernel 30 has no cluster of yours"):
        terminal.choose(found, 30)


def test_of_several_clusters_that_of_this_folder_is_meant() -> None:
    found = [
        terminal.Found(10, Path("10.sock"), "/home/me/a", "2 ranks"),
        terminal.Found(20, Path("20.sock"), "/home/me/b", "4 ranks", notebook="vision.ipynb"),
        terminal.Found(30, Path("30.sock"), "/home/me/b", "4 ranks", notebook="text.ipynb"),
    ]
    assert terminal.choose(found, None, Path("/home/me/a")) is found[0]
    assert terminal.choose(found, 20, Path("/home/me/a")) is found[1]
    two = r"20: 4 ranks, in /home/me/b/vision.ipynb[^$]*30: 4 ranks, in /home/me/b/text.ipynb"
    with pytest.raises(ClusterError, match=two):
        terminal.choose(found, None, Path("/home/me/b"))


def test_in_a_notebooks_folder_its_cluster_answers_and_others_are_listed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = terminal.Found(1, Path("1.sock"), "/home/me/a", "8 ranks", notebook="big.ipynb")
    monkeypatch.setattr(terminal, "find", lambda found=terminal.find: [other, *found()])
    requests = TerminalRequests(FakeSession(), tmp_path, "small.ipynb")
    try:
        assert terminal.stacks(None, "all") == "stacks of all"
        assert terminal.pause(None) == "Paused."
        assert terminal.peek(None, "w") == "w is 3"
        assert terminal.change(None, ["lr=0.01"]) == "changed {'lr': 0.01}"
        assert terminal.go_on(None) == "Going on."
        assert terminal.status(None) == (
            f"kernel {os.getpid()}: 2 ranks on cpu, gloo, in {tmp_path}/small.ipynb\nall idle\n\n"
            "In other folders:\nkernel 1: 8 ranks, in /home/me/a/big.ipynb"
        )
    finally:
        requests.close()


def test_status_of_several_clusters_shows_all(
    requests: TerminalRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = terminal.Found(1, Path("1.sock"), trouble="does not answer (timed out)")
    monkeypatch.setattr(terminal, "find", lambda found=terminal.find: [silent, *found()])
    assert terminal.status(None) == (
        "kernel 1: does not answer (timed out)\n\n"
        f"kernel {os.getpid()}: 2 ranks on cpu, gloo, in /home/me/thesis\nall idle"
    )


def test_sockets_are_looked_for_in_the_run_time_folder_and_in_temp_folders() -> None:
    environment = {"XDG_RUNTIME_DIR": "/run/me"}
    assert user_socket.folders(environment, Path("/scratch"), 7) == [
        Path("/run/me/nbdist"),
        Path("/scratch/nbdist_7_sockets"),
        Path("/tmp/nbdist_7_sockets"),
        Path("/run/user/7/nbdist"),
    ]
    assert user_socket.folders({"XDG_RUNTIME_DIR": "x"}, Path("/tmp"), 7) == [
        Path("/tmp/nbdist_7_sockets"),
        Path("/run/user/7/nbdist"),
    ]


def test_a_path_too_long_for_a_socket_leaves_it_to_the_next_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = place.parent / ("x" * 100)
    monkeypatch.setattr(user_socket, "own_folders", lambda: [long, place])
    server, path = user_socket.listen(4321)
    server.close()
    assert path == place / "4321.sock"


def test_a_file_in_the_place_of_a_folder_leaves_it_to_the_next_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place.parent / "a file"
    file.touch()
    monkeypatch.setattr(user_socket, "own_folders", lambda: [file, place])
    server, path = user_socket.listen(4321)
    server.close()
    assert path == place / "4321.sock"


def test_an_interrupt_to_stop_counts_on_every_thread_while_one_is_counting() -> None:
    from nbdist.client.cells import interrupts

    counted = []

    def count() -> None:
        with Interrupts() as inside:
            interrupts.here.interrupt_to_stop()
            counted.append(inside.count)

    thread = threading.Thread(target=count)
    thread.start()
    thread.join(10)
    with Interrupts() as before:
        pass
    interrupts.here.interrupt_to_stop()
    assert (counted, before.count) == ([1], 0)


def test_asking_from_a_terminal_imports_nothing_heavy() -> None:
    code = "import sys, nbdist.cli, nbdist.shared.processes.terminal; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "IPython", "ipyparallel", "psutil", "zmq"} & set(ran.stdout.split())
    assert struct.calcsize("3i") == 12  # what SO_PEERCRED holds: pid, uid, gid
