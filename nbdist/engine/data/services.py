"""What a rank gives its loaders, which know of no layout, no step and no recorder themselves.

What spreads a model and what watches steps stand above them; `rank/register` names them here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nbdist.engine.data.batches import Shard


@dataclass
class RankServices:
    """What a rank offers; a process that is none has what stands here. Main thread.

    Attributes:
        layout_shard: Says what this rank's shard is; None leaves it to the number of ranks.
        pace: Says how many samples a second this rank works through; 0 where that is not known.
        rest_s: Says how many seconds its steps take without waiting for data; 0 where not known.
        tell_loop: Gets what a record of kind "loader" tells, when a loop begins.
        indexes: A folder in which the headers of tars are noted, for the next loader over them.
    """

    layout_shard: Callable[[], Shard | None] = lambda: None
    pace: Callable[[], float] = lambda: 0.0
    rest_s: Callable[[], float] = lambda: 0.0
    tell_loop: Callable[[dict[str, float]], None] = lambda facts: None
    indexes: Path | None = None


here = RankServices()
