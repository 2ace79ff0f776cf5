"""What packages of a rank offer each other, in one list: no module registers itself on import.

Main thread, when the rank has joined its group; once is enough. What needs the rank's own program
(its recorder, its names) is connected in `boot.join`.
"""

from nbdist.engine.data import resume, shards
from nbdist.engine.layout import layout
from nbdist.engine.layout.axes import unused, zero1
from nbdist.engine.training import training

_is_done = False


def register() -> None:
    """Connect the packages of this process."""
    global _is_done
    if _is_done:
        return
    _is_done = True
    # First, and so before steps are counted: one that these refuse has not begun.
    unused.install()
    zero1.install()
    shards.shard_as(layout.data_shard)
    shards.pace_as(training.pace)
    resume.install()
