"""The widget of a board: points and words go to every page that shows it, clicks come back.

A page that opens gets the state, which holds all that there is at that moment: it is worked out
when it is asked for, so nothing is paid for pages that may come. What comes later are messages.

Importing this loads ipywidgets. Threads: made and closed on the main one; `send` on any; what pages
say is handled on a subshell's, see `hear_at_once`, or on the main one where there is none.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import anywidget
import traitlets

from nbdist.client.board.live.points import Points, PointStream
from nbdist.client.board.live.source import source

Hear = Callable[[dict[str, Any]], None]


VIEW_TYPE = "application/vnd.jupyter.widget-view+json"


class BoardWidget(anywidget.AnyWidget):
    """One board in all pages that show it.

    Args:
        board: Its id in the kernel, and in the outputs that show it.
        frame: What does not change, see `words.frame_of`.
        history: Returns what else a page that opens is given: points, and plain values.
        hear: Takes what a page says.
    """

    frame = traitlets.Dict().tag(sync=True)
    words = traitlets.Dict().tag(sync=True)
    history = traitlets.Dict().tag(sync=True)
    points = traitlets.Bytes().tag(sync=True)

    def __init__(
        self,
        board: str,
        frame: Mapping[str, Any],
        history: Callable[[], tuple[dict[str, Any], Points]],
        hear: Hear,
    ) -> None:
        self._esm = source()
        self._history_now = history
        super().__init__(model_id=board, frame=dict(frame))
        self.on_msg(lambda _, content, __: hear(content))
        hear_at_once(self)

    def get_state(
        self, key: str | Iterable[str] | None = None, drop_defaults: bool = False
    ) -> dict[str, Any]:
        """Return the state that a page is given: as ipywidgets', with what there is now."""
        state: dict[str, Any] = super().get_state(key, drop_defaults=drop_defaults)
        if key is None:
            now, points = self._history_now()
            state["words"] = now.pop("words")
            state["history"] = now | {"headers": points.headers}
            state["points"] = points.data
        return state

    def send_points(self, kind: str, points: Points, **more: Any) -> None:
        """Send points to all pages."""
        self.send({"kind": kind, "headers": points.headers, **more}, [points.data])

    def send_range(self, stream: PointStream, said: Mapping[str, Any]) -> None:
        """Send the page that asks for a range of steps their points. May read the disk."""
        match said:
            case {"low": float() | int() as low, "high": float() | int() as high}:
                points, page = stream.between(low, high), said.get("page")
                range_ = {"low": low, "high": high, "lost": points.lost, "page": page}
                self.send_points("range", points, **range_)

    def close(self) -> None:
        """Let go of it, and of its layout, which is a widget too."""
        layout = self.layout
        super().close()
        layout.close()


def view_of(board: str) -> dict[str, Any]:
    """Return the form of an output that shows the board with this id."""
    return {VIEW_TYPE: {"version_major": 2, "version_minor": 0, "model_id": board}}


class _AnsweredAnywhere:
    """A comm as the kernel's manager needs it: its messages are handled on the shell they name.

    ipykernel's comm would have each handled on the shell on which the comm has last spoken: a
    widget that was made in a cell would hear nothing until that cell ends (seen in ipykernel 7.4).
    """

    def __init__(self, comm: Any, manager: Any) -> None:
        self.comm_id, self.handle_msg = comm.comm_id, comm.handle_msg
        self._comm, self._manager = comm, manager
        manager.register_comm(self)

    def handle_close(self, message: Any) -> None:
        """Hear that the front end has closed it, and the manager forgotten it."""
        # The widget will close it too, and have it forgotten once more.
        self._manager.register_comm(self._comm)
        self._comm.handle_close(message)


def hear_at_once(widget: Any) -> None:
    """Have a widget hear what pages say while a cell runs.

    JupyterLab from 4.4 on sends it over a subshell of ipykernel 7: handlers run on that one's
    thread, while the main one waits for the cell. Other front ends send it to the main shell, where
    it is heard when the cell has ended.
    """
    import comm

    _AnsweredAnywhere(widget.comm, comm.get_comm_manager())
