"""Every error nbdist raises, and how one looks to the person who reads it.

    NBDistError
    ├── ClusterError        no engines, wrong state, engines that died
    │   └── LostStateError  something used whose state was lost, such as shards of a dead rank
    ├── StartError          a cluster that could not be started
    ├── UsageError          a wrong word on a magic's line
    ├── DataError           data that is not there, cannot be read, or has changed
    ├── CellSyntaxError     a cell that does not compile
    ├── LayoutError         a layout that does not fit the model or the ranks
    ├── MismatchError       ranks that call collectives which cannot meet
    ├── CheckpointError     a checkpoint that could not be written or restored
    ├── PublishError        a model that could not be published
    ├── TransferError       push or pull of something that cannot travel
    ├── TrackingError       runs that cannot be kept or shown
    ├── CheckError          a silent mistake, found by a rule that is set to raise
    ├── ExpectationError    what a run was expected to be, and is not
    └── RankError           code failed on one or more ranks

An error of state says three things: what happened, why, and what to do. In IPython these
errors print that text and no traceback, for the frames of nbdist explain nothing to a user.
"""


class NBDistError(Exception):
    """Base of nbdist's errors: what happened, why, what to do.

    Args:
        what: One sentence, what happened. Shown after the class name.
        why: The cause, with the numbers that matter; left out when `what` says it.
        do: The next command to type.
    """

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        super().__init__(what, why, do)
        self.what = what
        self.why = why
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"Why: {self.why}")
        if self.do:
            lines.append(f"Do:  {self.do}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive Exception's own pickling.
        return (_rebuild, (type(self), self.what, self.why, self.do), self.__dict__)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints instead of a traceback (its documented hook)."""
        return f"{type(self).__name__}: {self}".splitlines()


def install(extra: str = "") -> str:
    """Return what to type to install nbdist, with one of its extras.

    Until there is a release no index has nbdist: all that tell how to install it ask here.
    """
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in a clone of nbdist's repository"


def _rebuild(cls: type[NBDistError], what: str, why: str, do: str) -> NBDistError:
    return cls(what, why=why, do=do)


class ClusterError(NBDistError):
    """No ranks are running, or they are in no state for what was asked."""


class LostStateError(ClusterError):
    """Something is used whose state died with a rank, or is no longer whole."""


class StartError(NBDistError):
    """A cluster could not be started; whatever had been started was stopped again."""


class UsageError(NBDistError):
    """A word on a magic's line is wrong; the text says what is right."""


class DataError(NBDistError):
    """Data of a loader is not there, cannot be read, or is not what it was.

    The loader stands where the last whole batch ended.
    """


class CellSyntaxError(NBDistError):
    """A cell does not compile; it was sent to no rank."""


class Interrupted(KeyboardInterrupt):
    """The cell was interrupted, and all its ranks have settled.

    IPython shows the text instead of nbdist's own frames, under the name people know.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints instead of a traceback (its documented hook)."""
        return f"KeyboardInterrupt: {self}".splitlines()


Interrupted.__name__ = "KeyboardInterrupt"


class LayoutError(NBDistError):
    """A layout does not fit the ranks or the model."""


class MismatchError(NBDistError):
    """Ranks called collectives, or ends of a message, that cannot meet; this rank's was not sent.

    `what` is the same on every rank that finds out.
    """


class CheckpointError(NBDistError):
    """A checkpoint could not be written, or not be restored; nothing was restored by halves."""


class PublishError(NBDistError):
    """A model could not be published in MLflow's registry; nothing of it was."""


class TransferError(NBDistError):
    """A value could not be pushed to or pulled from the ranks."""


class TrackingError(NBDistError):
    """Runs cannot be kept, sent or shown; training itself is never stopped by this."""


class CheckError(NBDistError):
    """A rule that is set to `raise` has found a silent mistake in a training; nothing is lost.

    `rule` is its name, `what` the sentence that it says.
    """

    def __init__(self, what: str, *, why: str = "", do: str = "", rule: str = "") -> None:
        super().__init__(what, why=why, do=do)
        self.rule = rule


class ExpectationError(NBDistError, AssertionError):
    """A training is not what `%dist expect` says of it; nothing of it is lost."""


class RankError(NBDistError):
    """Code failed on one or more ranks.

    `what` is the whole text for people: groups of failures, root cause first, each with its
    traceback. `failures` maps each failed rank to (exception name, message); `causes` has a line
    for each cause, such as `rank 1 (localhost, cpu) died: killed by SIGKILL`.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        do: str = "",
        failures: dict[int, tuple[str, str]] | None = None,
        causes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(what, why=why, do=do)
        self.failures = failures or {}
        self.causes = causes
