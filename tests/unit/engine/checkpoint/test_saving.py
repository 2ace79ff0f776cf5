"""What a save is in another process than the one that makes it."""

import pickle
import threading

from nbdist.engine.checkpoint.saving import Saving
from nbdist.shared.errors import CheckpointError


def test_a_save_that_travels_is_what_there_is_to_tell_of_it() -> None:
    saving = Saving.__new__(Saving)
    vars(saving).update(step=3, folder="/x/step-00000003", nbytes=8, blocked_s=0.1, seconds=0.2)
    vars(saving).update(_error=None, _is_done=threading.Event(), _store=threading.Lock())
    came = pickle.loads(pickle.dumps(saving))
    assert repr(came) == "<checkpoint of step 3 in /x/step-00000003>"
    assert came.wait(0) is came

    vars(saving).update(_error=CheckpointError("The disk is full."))
    came = pickle.loads(pickle.dumps(saving))
    assert repr(came) == "<checkpoint of step 3, not written: The disk is full.>"
