"""Which groups a generation forms, from what the ranks say of themselves."""

from nbdist.engine.compat.groups.group_spec import GroupSpec
from nbdist.engine.group.plan import Hello, Key, make_plan
from nbdist.engine.group.shared_memory import Offer

SPEC = GroupSpec("gloo", 60.0, "undefined")
WORLD: Key = ("0", (0, 1, 2))


def hello(*groups: Key, count: int = 1, is_new: bool = False) -> Hello:
    return Hello(("127.0.0.1", 1), dict.fromkeys((WORLD, *groups), SPEC), count, is_new)


def test_a_hello_comes_back_from_the_store_as_it_was() -> None:
    specs = {WORLD: SPEC, ("1", (2, 0)): GroupSpec("cpu:gloo,cuda:nccl", 1.5, "mesh_dp", "mine")}
    for memory in (None, Offer("host", "/proc/3/fd/4", "abc", 5)):
        said = Hello(("::1", 7), specs, 9, is_new=True, memory=memory)
        assert Hello.from_json(said.to_json()) == said


def test_groups_that_all_members_have_live_on_larger_ones_first() -> None:
    pair, pair_too, other = ("12", (0, 1)), ("2", (0, 1)), ("3", (1, 2))
    plan = make_plan({0: hello(pair, pair_too), 1: hello(other, pair, pair_too), 2: hello(other)})
    assert list(plan.groups) == [WORLD, pair_too, other, pair]
    assert plan.stale == ()


def test_a_group_that_one_member_never_made_is_stale() -> None:
    half = ("1", (0, 1))
    plan = make_plan({0: hello(half, count=2), 1: hello(), 2: hello()})
    assert (list(plan.groups), plan.stale, plan.group_count) == ([WORLD], (half,), 2)


def test_a_replacement_gets_the_groups_that_its_peers_say_it_is_in_made_as_theirs() -> None:
    pair, made = ("1", (1, 2)), GroupSpec("gloo", 5.0, "mesh_tp")
    old = Hello(("127.0.0.1", 1), {WORLD: SPEC, pair: made}, 4)
    plan = make_plan({0: hello(count=4), 1: old, 2: hello(is_new=True)})
    assert plan.groups == {WORLD: SPEC, pair: made}
    assert plan.group_count == 4


def test_a_group_half_made_stays_stale_when_another_member_is_new() -> None:
    half = ("1", (0, 1, 2))
    plan = make_plan({0: hello(half), 1: hello(), 2: hello(is_new=True)})
    assert plan.stale == (half,)


def test_where_all_are_new_only_the_default_group_is_formed() -> None:
    plan = make_plan({rank: hello(is_new=True) for rank in range(3)})
    assert list(plan.groups) == [WORLD]


def test_where_a_rank_has_no_default_group_all_make_one_that_had_no_namesake() -> None:
    bare = Hello(("127.0.0.1", 1), {}, 5, default="")
    plan = make_plan({0: hello(), 1: bare, 2: hello(is_new=True)})
    assert (plan.groups, plan.stale, plan.default, plan.is_replaced) == ({}, (), "5", True)


def test_a_replacement_takes_the_name_that_the_others_have_for_the_default_group() -> None:
    world: Key = ("7", (0, 1, 2))
    old = Hello(("127.0.0.1", 1), {world: SPEC}, 8, default="7")
    plan = make_plan({0: old, 1: hello(is_new=True), 2: old})
    assert (list(plan.groups), plan.default, plan.is_replaced) == ([world], "7", False)
