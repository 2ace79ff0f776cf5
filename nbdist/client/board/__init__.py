"""The board: live plots of a cell that trains, and the picture it leaves in the notebook.

Importing this loads neither numpy, matplotlib nor ipywidgets.
"""

from nbdist.client.board.board import Board, Outcome, render_png
from nbdist.client.board.controls import show_past
from nbdist.client.board.past import Past, caption

__all__ = ["Board", "Outcome", "Past", "caption", "render_png", "show_past"]
