"""What users call refuses, in one sentence, what its signature cannot take."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import nbdist
from nbdist import border
from nbdist.client.output.result import CellResult
from nbdist.client.session.session import Session
from nbdist.errors import UsageError

METHODS: Any = Session  # called as no type checker would let one


def test_every_public_function_and_method_stands_at_the_border() -> None:
    public = [getattr(nbdist, name) for name in nbdist.__all__]
    methods = [value for name, value in vars(Session).items() if not name.startswith("_")]
    functions = [one for one in (*public, *methods) if inspect.isfunction(one)]
    assert functions
    assert all(hasattr(one, "__wrapped__") for one in functions)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: nbdist.start(n="2"), "nbdist.start takes a whole number or None as n, not '2'."),
        (lambda: nbdist.start(n=2.5), "as n, not 2.5."),
        (lambda: nbdist.publish(3, "x"), "takes a Module or a Layout as model, not 3."),
        (lambda: nbdist.loader([1], 16), "nbdist.loader(dataset, *, global_batch, shuffle=True"),
        (lambda: nbdist.loader([1], global_batch=1, shufle=True), "shuffle= in place of shufle="),
        (lambda: nbdist.loader([1], global_batch=1, seed="x"), "a whole number as seed, not 'x'."),
        (lambda: nbdist.restore(3), "nbdist.restore takes a text, a path or None as name, not 3."),
        (lambda: nbdist.init(layouts="ddp"), "takes a list of texts as layouts, not 'ddp'."),
        (lambda: nbdist.parallelize(3), "missing a required argument: 'layout'"),
        (lambda: nbdist.log(3), "too many positional arguments"),
        (lambda: METHODS.run(None, "1", ranks=[7]), "session.run takes a text as ranks, not [7]."),
        (lambda: METHODS.scale(None, "x"), "session.scale takes a whole number as n, not 'x'."),
        (lambda: METHODS.sweep(None, "1", {"lr": 3}), "a dict of lists as lists, not {'lr': 3}."),
        (lambda: METHODS.run_script(None, 3), "takes a text or a path as path, not 3."),
    ],
)
def test_a_wrong_call_is_refused_in_one_sentence(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert said in str(error.value)
    assert error.value.do


def test_what_says_that_it_is_a_number_passes_for_one() -> None:
    numpy = pytest.importorskip("numpy")

    @border.checked
    def take(
        n: int, x: float, on: bool, some: Sequence[float], names: Mapping[str, int] | None = None
    ) -> tuple[Any, ...]:
        return n, x, on, some, names

    assert take(numpy.int64(2), 1, numpy.bool_(True), numpy.ones(2))[0] == 2
    with pytest.raises(UsageError, match="a list of numbers as some, not 'ab'"):
        take(1, 1.0, True, "ab")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a dict of whole numbers or None as names"):
        take(1, 1.0, True, (), {"a": "b"})  # type: ignore[dict-item]


def test_coroutines_and_generators_stay_as_they_are() -> None:
    async def later(n: int) -> int:
        return n

    assert border.checked(later) is later


def test_a_type_error_of_the_function_itself_is_not_touched() -> None:
    @border.checked
    def fail() -> None:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        fail()


def test_a_result_of_a_rank_that_did_not_run_names_those_that_did() -> None:
    result = CellResult({})
    assert result.get(5) is None
    with pytest.raises(UsageError, match="no result of rank 5"):
        result[5]


@pytest.mark.parametrize(
    "call",
    [
        lambda: nbdist.log(a=1),
        lambda: nbdist.loader([1], global_batch=1),
        lambda: nbdist.parallelize(None, "ddp"),
        lambda: nbdist.init(),
        lambda: nbdist.save(),
    ],
)
def test_a_call_for_ranks_is_refused_where_there_is_a_session(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(border, "_has_session", lambda: True)
    with pytest.raises(UsageError, match="is for ranks, and this process is none"):
        call()
