"""What cells set beside names, which a script does not share with the notebook."""

import pytest

from nbdist.client.export.settings_lost import MAY_DRAW, settings_in
from tests.unit.client.export.exported import reasons, script

DRAWS = "import matplotlib.pyplot as plt\nplt.plot(step())"
TRAINS = "%%distributed\nx = torch.randn(3)"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.manual_seed(0)", ("torch.manual_seed",)),
        (
            "torch.cuda.manual_seed_all(0); torch.seed()",
            ("torch.cuda.manual_seed_all", "torch.seed"),
        ),
        ("import numpy as np, random\nrandom.seed(0)", ("random.seed",)),
        ("np.random.seed(0)", ("numpy.random.seed",)),
        ("from torch import manual_seed as seed_it\nseed_it(0)", ("torch.manual_seed",)),
        ("transformers.set_seed(1); fix_seed(2)", ("transformers.set_seed", "fix_seed")),
        ("torch.random.set_rng_state(state)", ("torch.random.set_rng_state",)),
        ("torch.set_default_dtype(torch.float64)", ("torch.set_default_dtype",)),
        ("torch.use_deterministic_algorithms(True)", ("torch.use_deterministic_algorithms",)),
        (
            "torch.backends.cudnn.benchmark = a = True",
            ("torch.backends.cudnn.benchmark",),
        ),
        ("import os\nos.environ['A'] = '1'", ("os.environ['A']",)),
        ("def seed():\n    torch.manual_seed(0)\nseed()", ("torch.manual_seed",)),
        ("def seed():\n    torch.manual_seed(0)", ()),
        ("g = torch.Generator().manual_seed(0)\ng.manual_seed(1)", (MAY_DRAW,)),
        ("rng.seed(0); torch.randn(3); x.benchmark = 1", (MAY_DRAW,)),
        ("files = !ls", ()),
    ],
)
def test_what_code_sets_beside_names_is_found(code: str, found: tuple[str, ...]) -> None:
    assert settings_in(code) == found


def test_a_seed_of_a_cell_that_is_left_out_is_told() -> None:
    cell = f"%%distributed\ntorch.manual_seed(0)\n{DRAWS}"
    (told,) = script(TRAINS, cell, TRAINS).doubts
    assert told == (
        "Cell 2, which is left out, calls torch.manual_seed: random numbers after it are others in"
        " the script."
    )
    assert script(TRAINS, cell).doubts == ()


def test_settings_of_a_cell_that_is_left_out_are_told() -> None:
    body = "torch.set_default_dtype(torch.float64)\ntorch.backends.mkldnn.enabled = False"
    (told,) = script(f"%%distributed\n{body}\n{DRAWS}", TRAINS).doubts
    assert told == (
        "Cell 1, which is left out, calls torch.set_default_dtype and sets "
        "torch.backends.mkldnn.enabled: the script leaves that as it was."
    )


def test_a_seed_of_a_cell_that_has_failed_may_have_been_set() -> None:
    cell = "%%distributed\ntorch.manual_seed(0)\n1 / 0"
    (told,) = script(cell, TRAINS, failed=(1,)).doubts
    assert told == (
        "Cell 1, which has failed, may have called torch.manual_seed: random numbers after it may"
        " be others in the script."
    )


def test_a_seed_of_a_cell_that_uses_what_is_left_out_is_told() -> None:
    gone, uses = "%%distributed\na = input()", "%%distributed\ntorch.manual_seed(a)"
    (told,) = script(gone, uses, TRAINS).doubts
    assert told.startswith("Cell 2, which is left out, calls torch.manual_seed:")


SEED = "%%distributed\ntorch.manual_seed(0);"
LAYER = "%%distributed\nm = Linear(3, 3)"


@pytest.mark.parametrize(
    ("code", "draws"),
    [
        ("m = Linear(3, 3)", True),
        ("m = nn.Linear(3, 3).to(device)", True),
        ("order = torch.randperm(3)", True),
        ("nn.init.ones_(w); random.shuffle(x)", True),
        ("def make(): return nn.Linear(3, 3)", False),
        ("def make(): return nn.Linear(3, 3)\nm = make()", True),
        ("torch.manual_seed(0); print(Linear)", False),
        ("random.seed(0); x = torch.zeros(3).sum()", False),
        ("[f for f in fs][0](1)", False),
        ("if dist.is_initialized(): raise ValueError(x.permute(0))", False),
    ],
)
def test_what_may_draw_random_numbers_is_known_by_its_name(code: str, draws: bool) -> None:
    assert (MAY_DRAW in settings_in(code)) is draws


def test_cells_left_out_that_may_have_drawn_after_a_seed_are_told_once() -> None:
    (told,) = script(SEED, LAYER, TRAINS, failed=(2,)).doubts
    assert told == (
        "Cell 2, which is left out, may have drawn random numbers: those after it may be others in"
        " the script."
    )
    (told,) = script(SEED, LAYER, TRAINS, LAYER, TRAINS, failed=(2, 4)).doubts
    assert told.startswith("Cells 2, 4, which are left out, may have drawn random numbers: those")


@pytest.mark.parametrize(
    ("cells", "failed"),
    [
        ((SEED, TRAINS, LAYER), 3),  # none follows
        ((TRAINS, LAYER, TRAINS), 2),  # nothing is seeded
        ((SEED, LAYER, SEED, TRAINS), 2),  # which begins anew
        ((SEED, "%%distributed\nprint(x)", TRAINS), 2),
        ((SEED, "m = Linear(3, 3)", TRAINS), 0),  # the notebook's own
    ],
)
def test_numbers_that_no_cell_left_out_has_moved_are_not_told(
    cells: tuple[str, ...], failed: int
) -> None:
    assert script(*cells, failed=(failed,)).doubts == ()


def test_a_seed_of_the_notebooks_own_is_none_of_the_ranks() -> None:
    assert script("torch.manual_seed(0)", TRAINS).doubts == ()


ANEW = (
    "The ranks were started anew after cell 2: in the script, what the cells up to it have set is"
    " still there."
)


@pytest.mark.parametrize("again", ["%dist restart", "%dist stop\n%dist start -n 2"])
def test_ranks_that_were_started_anew_between_cells_are_told(again: str) -> None:
    made = script("%dist start", TRAINS, again, "%%distributed\ny = 1")
    assert made.doubts == (ANEW,)
    assert made.left_out == ()


def test_a_stop_and_a_start_in_cells_of_their_own_start_ranks_anew() -> None:
    cells = ("%dist start", TRAINS, "%dist stop", "%dist start", "%%distributed\ny = 1")
    assert script(*cells).doubts == (ANEW,)


@pytest.mark.parametrize(
    "cells",
    [
        ("%dist start", "%dist restart", TRAINS),
        ("%dist start", TRAINS, "%dist restart"),
        ("%dist start", TRAINS, "%dist stop"),
        ("%dist start", TRAINS, "%dist start", TRAINS),
    ],
)
def test_ranks_that_begin_with_the_script_or_end_with_it_are_not_told(cells: tuple[str]) -> None:
    assert script(*cells).doubts == ()


def test_ranks_that_were_replaced_go_on_with_what_others_hold() -> None:
    cells = (TRAINS, "%dist restart -r 1", "%%distributed\ny = 1")
    assert script(*cells).doubts == ()
    assert reasons(*cells) == {2: "has '%dist restart -r 1', which has no meaning in a script"}
