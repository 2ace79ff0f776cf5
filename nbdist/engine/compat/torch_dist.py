"""`torch.distributed` as torch made it, for nbdist's own use on a rank.

A cell may put functions of its own in torch's place (`dist.is_initialized = lambda: False`), for
itself or to test a program. What it gives there is no answer for a recovery: everything in
`nbdist.engine` asks here, where the names lead to what they led to when this was imported.
"""

from torch.distributed import *  # noqa: F403
