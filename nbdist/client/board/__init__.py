"""The board: live plots of a cell that trains, and the picture it leaves in the notebook.

Importing this loads neither numpy, matplotlib nor ipywidgets.
"""

from nbdist.client.board.views import VIEWS

__all__ = ["VIEWS"]
