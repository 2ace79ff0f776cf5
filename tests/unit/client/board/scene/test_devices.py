"""What processes and devices do over time, in the board's view "ranks"."""

import numpy as np
import pytest
from matplotlib.text import Text

from nbdist.client.board import palette, tables
from nbdist.client.board.drawn.plots.lanes_over_time import name_time
from nbdist.client.board.figure import compose
from nbdist.client.board.scene.devices import QUANTITIES
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.views import ranks as view
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import Batch, Record
from tests.unit.client.board.board_data import cell_info, devices_of, steps_of, training


def seen(ranks: int, *, gpu: bool, seconds: int = 60) -> Scene:
    telemetry = training(ranks, 60)
    for rank in range(ranks):
        telemetry.receive(devices_of(rank, seconds, gpu=gpu))
    return look(telemetry, cell_info(ranks, "cuda:0" if gpu else "cpu"))


def lane_pixels(scene: Scene, key: str) -> list[int]:
    """Return how many pixels of the quantity's colour each lane has, from the top."""
    page = compose(scene, palette.theme_named("light"), scale=2, name="ranks")
    image = page.pixels()[..., :3].astype(int)
    named = QUANTITIES[key].title
    (box,) = [axes.bbox for axes in page.figure.axes if axes.get_title("left") == named]
    top, bottom = image.shape[0] - int(box.y1), image.shape[0] - int(box.y0)
    inside = image[top:bottom, int(box.x0) : int(box.x1)]
    color = [int(QUANTITIES[key].color[at : at + 2], 16) for at in (1, 3, 5)]
    is_filled = (abs(inside - color) < 8).all(axis=2)
    return [int(lane.sum()) for lane in np.array_split(is_filled, len(scene.ranks))]


@pytest.mark.parametrize("ranks", [2, 64])
def test_each_rank_has_a_lane_as_full_as_its_device_is_busy(ranks: int) -> None:
    lanes = lane_pixels(seen(ranks, gpu=True), "device_pct")

    busy = [count for rank, count in enumerate(lanes) if rank != 1]
    assert lanes[1] < 0.4 * min(busy)  # rank 1 idles
    assert min(busy) > 0.7 * max(busy)


def test_quantities_have_units_and_the_scale_that_a_device_gives_them() -> None:
    scene = seen(4, gpu=True)
    page = compose(scene, palette.theme_named("light"), name="ranks")

    words = {text.get_text() for text in page.figure.findobj(Text)}

    assert {"device use", "device memory in use", "device temperature", "device power"} <= words
    assert {
        "0 to 100 %",
        "0 to 80 GB",
        "20 to 100 °C",
        "0 to 600 W",
        "processor, of a core",
    } <= words


def test_of_ranks_on_processors_their_share_and_memory_are_shown() -> None:
    scene = seen(2, gpu=False)

    assert [panel.key for panel in scene.devices] == ["cpu_pct", "resident_bytes"]
    assert {panel.by for panel in scene.devices} == {"second"}
    assert [float(panel.lines[1].x[-1]) for panel in scene.devices] == [59.0, 59.0]


def test_where_nothing_is_told_there_are_no_lanes_and_no_columns() -> None:
    scene = look(training(2, 60), cell_info(2))

    assert scene.devices == ()
    assert view.height(scene, 960) < view.height(seen(2, gpu=False), 960)
    assert view.table(scene).head[-1] == "memory"
    assert "processor" not in view.sentence(scene)


def test_the_table_has_the_newest_numbers_with_their_units() -> None:
    table = view.table(seen(2, gpu=True))
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]

    assert (rows[0]["in use by all"], rows[0]["W"]) == ("61 GB of 80 GB", "550")
    assert 90 <= int(rows[0]["device %"]) <= 98
    assert rows[1]["°C"] == "38"
    assert "device %" in tables.to_text(table)


def test_the_sentence_names_the_idlest_and_the_warmest_device() -> None:
    said = view.sentence(seen(4, gpu=True))

    assert "device use 1" in said
    assert "% on rank 1 to 9" in said
    assert said.endswith("at most 61 °C on rank 0.")


def test_what_is_not_known_of_gpus_is_said_once() -> None:
    unknown = "GPU use is not known: nvidia-ml-py is not installed."
    telemetry = Telemetry()
    for rank in range(2):
        records = steps_of(rank, 2, 3).records
        telemetry.receive(Batch(rank, records, {"gpu_unknown": unknown}))

    said = view.sentence(look(telemetry, cell_info(2, "cuda:0")))

    assert said.count(unknown) == 1


def test_numbers_of_devices_are_no_numbers_of_the_user() -> None:
    telemetry = Telemetry()
    telemetry.receive(devices_of(0, 5, gpu=True))
    telemetry.receive(Batch(0, (Record(0, 10**7, "log", 0, 0, {"reward": 1.0}),)))

    scene = look(telemetry, cell_info(1))

    assert scene.rows[0].own == {"reward": 1.0}
    assert view.table(scene).rows[0][2] == "logs"


def test_a_rank_that_has_told_nothing_yet_leaves_its_lane_empty() -> None:
    telemetry = training(2, 60)
    telemetry.receive(devices_of(1, 60, gpu=False))

    lanes = lane_pixels(look(telemetry, cell_info(2)), "cpu_pct")

    assert lanes[0] == 0 < lanes[1]


def test_moments_are_named_in_seconds_minutes_and_hours() -> None:
    assert [name_time(s) for s in (0, 30, 60, 300, 7200)] == ["0", "30 s", "1 min", "5 min", "2 h"]
