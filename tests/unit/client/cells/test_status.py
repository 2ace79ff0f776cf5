"""The table of `%dist status`."""

from dataclasses import replace

from nbdist.client.cells.status import RankLine, Stacks, Status, describe_snapshot


def test_the_table_has_a_line_for_each_rank_in_aligned_columns() -> None:
    idle = RankLine(0, "localhost", "cpu", 123, "idle", 7, 3 * 2**20, "all_reduce")
    dead = RankLine(1, "localhost", "cpu", 4567, "dead: killed by SIGKILL")
    status = Status("2 ranks on cpu, gloo", (idle, dead))
    first, head, *lines = str(status).splitlines()
    assert first == "2 ranks on cpu, gloo"
    assert head.split("  ")[0] == "rank"
    assert head.index("state") == lines[0].index("idle") == lines[1].index("dead")
    assert "3.1 MB" in lines[0]
    assert repr(status) == str(status)


def test_the_memory_of_gpus_stands_beside_that_of_processes_where_there_are_any() -> None:
    line = RankLine(0, "localhost", "cuda:0", 123, "idle", 7, 612 * 10**6)
    told = {"allocated_bytes": 20e9, "reserved_bytes": 28e9, "peak_bytes": 25e9}
    told |= {"device_total_bytes": 80e9}
    head, row = str(Status("2 ranks", (replace(line, gpu=told),))).splitlines()[1:]
    words = head[head.index("GPU allocated") :].split("  ")
    assert [word.strip() for word in words if word] == ["GPU allocated", "reserved", "peak", "of"]
    for name, size in (("memory", "612 MB"), ("GPU", "20 GB"), ("reserved", "28 GB")):
        assert row[head.index(name) :].startswith(size)
    assert row[head.index("peak") :].split()[:4] == ["25", "GB", "80", "GB"]
    assert "GPU" not in str(Status("2 ranks", (line,)))


def test_stacks_print_what_a_rank_does_and_its_main_thread_with_cells_named_as_such() -> None:
    main = '  File "/tmp/ipykernel_nbdist/ab12.py", line 3, in <module>\n    work()\n'
    stacks = Stacks(
        {0: "computing in work (line 3)", 1: "idle", 2: "not answering: stopped (SIGSTOP?)"},
        {0: {"MainThread": main, "nbdist-output": "loop"}, 1: {"MainThread": "idle"}},
    )
    assert str(stacks).splitlines() == [
        "rank 0: computing in work (line 3)",
        "  cell, line 3, in <module>",
        "    work()",
        "rank 1: idle",
        "rank 2: not answering: stopped (SIGSTOP?)",
    ]
    assert stacks[0]["nbdist-output"] == "loop"
    assert list(stacks) == [0, 1]


def test_without_ranks_there_is_one_sentence() -> None:
    assert str(Status.stopped("nothing was started.")) == (
        "No ranks are running: nothing was started."
    )


def test_snapshots_are_a_column_where_there_are_some() -> None:
    held = describe_snapshot({"step": 412, "age_s": 8.2, "bytes": 1.2e9})
    line = RankLine(0, "localhost", "cpu", 123, "idle", 7, snapshot=held)
    without = str(Status("2 ranks", (replace(line, snapshot=""),)))
    assert "snapshot" not in without
    shown = str(Status("2 ranks", (line,), "No snapshot of the sharded state is kept: ..."))
    assert "step 412, 8 s old, 1.2 GB" in shown
    assert shown.splitlines()[-1].startswith("No snapshot")
    assert describe_snapshot({"refused": "no room"}) == "refused"
    assert describe_snapshot(None) == ""
