import io
import math
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from nbdist.client.board import palette
from nbdist.client.board.figure import draw
from nbdist.client.board.scene.look import look
from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.shared.wire import Batch, Record
from tests.unit.client.board.board_data import cell_info, training


def render_png(
    telemetry: Telemetry, info: CellInfo, *, background: str | None = None, scale: float
) -> bytes:
    """Return the overview of a run."""
    return draw(look(telemetry, info), palette.theme_on(background), scale=scale)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 64])
def test_any_number_of_ranks_makes_a_picture_that_is_not_empty(ranks: int) -> None:
    image = pixels(render_png(training(ranks, 50), cell_info(ranks), scale=1))

    assert image.shape[1] == 960
    assert (image[..., 3] > 0).mean() > 0.02


def test_without_a_known_background_the_picture_is_transparent() -> None:
    image = pixels(render_png(training(2, 50), cell_info(2), scale=1))

    assert (image[..., 3] == 0).mean() > 0.5


def test_on_a_known_background_the_picture_is_opaque() -> None:
    image = pixels(render_png(training(2, 50), cell_info(2), background="#111111", scale=1))

    assert (image[..., 3] == 255).all()
    assert np.abs(image[2, 2, :3].astype(int) - 0x11).max() < 8


def test_a_plot_appears_when_the_user_has_logged() -> None:
    telemetry = training(1, 10)
    one_row = png_height(telemetry)
    own = {"accuracy": 0.5}
    telemetry.receive(Batch(0, tuple(Record(0, 10 + i, "log", i, i, own) for i in range(3))))

    assert png_height(telemetry) > one_row


def png_height(telemetry: Telemetry) -> int:
    return len(pixels(render_png(telemetry, cell_info(1), scale=1)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_loss_that_goes_wild_is_drawn_all_the_same(bad: float) -> None:
    telemetry = training(2, 60)
    for rank in range(2):
        rows = tuple(Record(rank, 60 + i, "step", 61 + i, 0, {"loss": bad}) for i in range(5))
        telemetry.receive(Batch(rank, rows))

    assert render_png(telemetry, cell_info(2), scale=1)


def test_a_loss_that_was_never_finite_is_drawn_all_the_same() -> None:
    telemetry = Telemetry()
    telemetry.receive(Batch(0, (Record(0, 0, "step", 1, 0, {"loss": math.nan}),)))

    assert render_png(telemetry, cell_info(1), scale=1)


def test_pyplot_is_never_loaded() -> None:
    code = (
        "import sys\n"
        "import nbdist.client.board.cell_board\n"
        "assert not {'numpy', 'matplotlib', 'ipywidgets', 'PIL'} & set(sys.modules)\n"
        "from tests.unit.client.board.board_data import cell_info, training\n"
        "from tests.unit.client.board.test_figure import render_png\n"
        "render_png(training(2, 20), cell_info(2), scale=1)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_and_words_of_every_view_load_no_matplotlib() -> None:
    code = (
        "import sys\n"
        "from nbdist.client.notebook import arguments\n"
        "assert not {'numpy', 'matplotlib', 'ipywidgets', 'PIL'} & set(sys.modules)\n"
        "from nbdist.client.board import VIEWS, palette\n"
        "from nbdist.client.board.scene.look import look\n"
        "from nbdist.client.board.past import Past\n"
        "from tests.unit.client.board.board_data import analysis_of, cell_info, training\n"
        "past = Past(look(training(2, 60), cell_info(2), analysis_of(2)), palette.theme_on(None))\n"
        "assert all(past.plain(name) and past.words(name).data for name in VIEWS)\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
