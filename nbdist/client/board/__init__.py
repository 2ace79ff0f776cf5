"""The board: live plots of a cell that trains, and the picture it leaves in the notebook.

Importing this loads neither numpy, matplotlib nor ipywidgets.
"""

# What `%dist board` can show, in the order of its buttons.
VIEWS = {
    "overview": "loss, communication, and what a step is made of",
    "loss": "of each rank, and their mean",
    "step": "where a step's time goes on each rank, and who waits for whom",
    "collectives": "a table of them, and a time line of the last steps",
    "ranks": "each rank's state, speed and memory",
    "verdicts": "who makes the others slow, and why",
}
