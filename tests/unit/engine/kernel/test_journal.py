"""What a rank keeps of a cell for a notebook that comes later."""

from typing import Any

from nbdist.engine.kernel.ipython.journal import Journal
from nbdist.shared import wire


def message(number: int, kind: str, **content: Any) -> dict[str, Any]:
    return {"header": {"msg_id": f"m{number}"}, "msg_type": kind, "content": content}


def text(number: int, said: str, **more: Any) -> dict[str, Any]:
    return message(number, wire.OUTPUT, parts=[["stdout", said]], **more)


def test_what_a_cell_has_shown_is_told_in_order_with_the_ids_of_its_messages() -> None:
    journal = Journal()
    journal.begin("cell", keeps=True)
    journal.add(text(1, "a"))
    journal.add(message(2, "status", execution_state="idle"))
    journal.add(message(3, wire.RECORDS, rows=[]))
    journal.add(message(4, "display_data", data={"text/plain": "b"}))
    told = journal.report("cell", whole=True)
    assert [(of, kind) for of, kind, _ in told["sent"]] == [
        ("m1", wire.OUTPUT),
        ("m4", "display_data"),
    ]
    assert told["known"] is True
    assert told["reply"] is None
    journal.end({"status": "ok"})
    assert journal.report("cell", whole=False) == {
        "known": True,
        "reply": {"status": "ok"},
        "dropped": 0,
        "sent": [],
    }


def test_of_a_window_of_text_only_the_newest_is_kept() -> None:
    journal = Journal()
    journal.begin("cell", keeps=True)
    for number in range(5):
        journal.add(text(number, f"at {number}", window=0, cut_bytes=number))
    journal.add(text(5, "next", window=1, cut_bytes=0))
    assert [of for of, _, _ in journal.report("cell", whole=True)["sent"]] == ["m4", "m5"]


def test_beyond_its_bound_the_oldest_messages_go_and_are_counted() -> None:
    journal = Journal(most_bytes=1000)
    journal.begin("cell", keeps=True)
    for number in range(10):
        journal.add(message(number, "display_data", data={"image/png": "x" * 400}))
    told = journal.report("cell", whole=True)
    assert [of for of, _, _ in told["sent"]] == ["m8", "m9"]
    assert told["dropped"] == 8


def test_another_cell_or_one_of_a_cluster_that_is_not_detached_is_not_known() -> None:
    journal = Journal()
    journal.begin("one", keeps=True)
    journal.add(text(1, "a"))
    journal.begin("two", keeps=False)
    journal.add(text(2, "b"))
    journal.end({"status": "ok"})
    nothing: dict[str, Any] = {"known": False, "reply": None, "dropped": 0, "sent": []}
    assert [journal.report(of, whole=True) for of in ("one", "two", "")] == [nothing] * 3
