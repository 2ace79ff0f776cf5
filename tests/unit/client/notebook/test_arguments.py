"""The words after `%dist` and `%%distributed`."""

from typing import Any

import pytest

from nbdist.client.board import VIEWS
from nbdist.client.notebook.arguments import COMMANDS, parse_dist, parse_distributed
from nbdist.client.notebook.completion import complete
from nbdist.shared.errors import UsageError


def test_bare_dist_is_status() -> None:
    asked = parse_dist("")
    assert asked is not None
    assert asked.command == "status"


def test_options_of_start_are_read_and_absent_ones_are_none() -> None:
    asked = parse_dist("start -n 4 --device cpu --timeout 60 --threads 2")
    assert asked is not None
    assert (asked.n, asked.device, asked.timeout, asked.threads) == (4, "cpu", 60.0, 2)
    assert asked.backend is asked.launcher is asked.tracking_uri is None


def test_options_of_a_cell_are_read() -> None:
    asked = parse_distributed("-r 0,2 --run 'my run' --resume --no-track --timeout 1.5")
    assert asked is not None
    assert (asked.ranks, asked.run, asked.timeout) == ("0,2", "my run", 1.5)
    assert asked.resume
    assert asked.no_track
    bare = parse_distributed("")
    assert bare is not None
    assert (bare.ranks, bare.timeout, bare.params, bare.no_track) == ("all", None, [], False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lr=3e-4", 3e-4),
        ("lr=-1", -1),
        ("x=(1,2)", (1, 2)),
        ("x=None", None),
        ("x='\"a=b\"'", "a=b"),
        ("x=[1,[2.5]]", [1, [2.5]]),
        ("'x={\"a\": 1}'", {"a": 1}),
        ('opt="sgd"', "sgd"),
        ("opt='it\\'s'", "it's"),
        ('opt=["a","b c"]', ["a", "b c"]),
        ("h=[32, (64, 2)]", [32, (64, 2)]),
        ('tag="1"', "1"),
    ],
)
def test_a_parameter_is_a_python_literal(text: str, value: Any) -> None:
    asked = parse_distributed(f"-p {text}")
    assert asked is not None
    assert asked.params[0][1] == value


@pytest.mark.parametrize("text", ["lr", "=3", "a b=3", "1x=3", "x=", "x=abc", "x=__import__('os')"])
def test_what_is_no_parameter_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_distributed(f'-p "{text}"')
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_is_a_number_of_seconds_above_zero(seconds: str) -> None:
    with pytest.raises(UsageError, match="above 0"):
        parse_distributed(f"--timeout '{seconds}'")


def test_chaos_takes_kinds_and_an_end() -> None:
    asked = parse_dist("chaos kill,raise -r 1-2 --every 2s --for 60 --seed 3")
    assert asked is not None
    assert (asked.kinds, asked.ranks, asked.every) == (("kill", "raise"), "1-2", 2.0)
    assert (asked.seconds, asked.faults, asked.seed) == (60.0, None, 3)


def test_chaos_without_words_asks_what_came_of_it() -> None:
    asked = parse_dist("chaos")
    assert asked is not None
    assert asked.kinds == ()


@pytest.mark.parametrize(
    "line", ["chaos kil", "chaos off,kill", "chaos kill --faults -1", "chaos kill --for 0"]
)
def test_a_wrong_word_for_chaos_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        parse_dist(line)


@pytest.mark.parametrize("line", ["stat", "strat -n 4", "'unclosed", "start extra", "push -r 0"])
def test_a_wrong_word_is_one_line(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_dist(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["pull a --bad", "retry 3", "status foo", "export t.py --bad"])
def test_a_word_that_a_command_does_not_know_is_refused_with_the_commands_help(line: str) -> None:
    command, *_, word = line.split()
    with pytest.raises(UsageError) as refused:
        parse_dist(line)
    assert str(refused.value) == (
        f"%dist {command}: unrecognized arguments: {word}  (%dist {command} --help)"
    )


def test_an_option_that_cells_do_not_have_is_refused_with_their_help() -> None:
    with pytest.raises(UsageError) as refused:
        parse_distributed("--foo")
    assert str(refused.value) == (
        "%%distributed: unrecognized arguments: --foo  (%%distributed --help)"
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("start -n x", "-n takes a whole number, not 'x'"),
        ("scale two", "N takes a whole number, not 'two'"),
        ("export t.py --nodes 1.5", "--nodes takes a whole number, not '1.5'"),
        ("start --timeout x", "--timeout takes a number of seconds above 0, not 'x'"),
    ],
)
def test_what_is_no_number_is_refused_with_what_is_wanted(line: str, sentence: str) -> None:
    command = line.split()[0]
    with pytest.raises(UsageError) as refused:
        parse_dist(line)
    assert str(refused.value) == f"%dist {command}: {sentence}  (%dist {command} --help)"


@pytest.mark.parametrize("line", ["start --name a", "export t.py --for", "runs --syn"])
def test_the_beginning_of_an_option_is_none(line: str) -> None:
    with pytest.raises(UsageError, match="unrecognized arguments: --"):
        parse_dist(line)


def test_a_run_without_a_script_asks_for_the_script_alone() -> None:
    with pytest.raises(UsageError, match=r"missing: PATH  \("):
        parse_dist("run")
    asked = parse_dist("run -r 0 -m pkg.train --lr 1 -m x")
    assert asked is not None
    assert (asked.is_module, asked.path) == (True, "pkg.train")
    assert asked.arguments == ["--lr", "1", "-m", "x"]


def test_a_word_that_is_nearly_right_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean restart"):
        parse_dist("restrat")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_prints_and_asks_for_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_dist(f"{command} --help") is None
    assert f"usage: %dist {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%dist ", list(COMMANDS)),
        ("%dist re", ["restart", "retry", "replay"]),
        ("x = 1\n%dist ret", ["retry"]),
        ("%dist start --back", ["--backend"]),
        ("%dist push x --ra", ["--ranks"]),
        ("%dist chaos st", ["stop"]),
        ("%dist chaos kill,s", ["kill,stop", "kill,slow"]),
        ("%dist chaos kill --ev", ["--every"]),
        ("%%distributed --t", ["--timeout"]),
        ("%%distributed --ret", ["--retry"]),
        ("%dist nonsense --x", []),
        ("dist.re", []),
        ("%distx re", []),
        ("%dist", []),
    ],
)
def test_completion(text: str, expected: list[str]) -> None:
    assert complete(text, len(text)) == expected


def test_completion_looks_at_the_cursor_and_not_at_the_end() -> None:
    assert complete("%dist re\nother", 8) == ["restart", "retry", "replay"]


def test_the_board_takes_a_view_or_none() -> None:
    bare, asked = parse_dist("board"), parse_dist("board collectives")
    assert bare is not None
    assert asked is not None
    assert (bare.view, asked.view) == (None, "collectives")
    assert bare.run is asked.run is None


def test_a_wrong_view_is_refused_in_a_line_that_says_what_is_right() -> None:
    with pytest.raises(UsageError, match="did you mean collectives") as close:
        parse_dist("board careful colectives")
    with pytest.raises(UsageError, match="one of overview, loss, step, ") as far:
        parse_dist("board --run careful xyz")
    assert "\n" not in f"{close.value}{far.value}"


@pytest.mark.parametrize(
    ("line", "run", "view"),
    [
        ("board careful", "careful", None),
        ("board careful step", "careful", "step"),
        ("board 2 loss", "2", "loss"),
        ("board step loss", "step", "loss"),
        ("board --run step", "step", None),
        ("board --run step loss", "step", "loss"),
        ("board loss --run step", "step", "loss"),
    ],
)
def test_the_board_takes_a_run_and_a_view_and_one_word_that_is_a_views_is_the_view(
    line: str, run: str | None, view: str | None
) -> None:
    asked = parse_dist(line)
    assert asked is not None
    assert (asked.run, asked.view) == (run, view)


def test_two_runs_for_one_board_are_refused() -> None:
    with pytest.raises(UsageError, match="both name a run"):
        parse_dist("board careful step --run other")


def test_views_of_the_board_complete() -> None:
    assert complete("%dist board ", 12) == list(VIEWS)
    assert complete("%dist board co", 14) == ["collectives"]


def test_a_bare_word_is_refused_with_what_to_type() -> None:
    with pytest.raises(
        UsageError, match=r'takes a Python literal, not \'sgd\'; for text type -p opt="sgd"'
    ):
        parse_distributed("-p opt=sgd --no-track")


def test_what_follows_a_parameter_is_split_as_before() -> None:
    asked = parse_distributed("-p h=[1, 2] --run 'my run' -plr=1")
    assert asked is not None
    assert (asked.params, asked.run) == ([("h", [1, 2]), ("lr", 1)], "my run")


@pytest.mark.parametrize("line", ["-p h=[1, 2 --run a", "-p opt='a", "--run 'a"])
def test_what_is_not_closed_is_said(line: str) -> None:
    with pytest.raises(UsageError, match="No closing"):
        parse_distributed(line)


@pytest.mark.parametrize(
    "line", ["start -n 4   # one rank per GPU", "start -n 4 # it's me", "start -n 4\t#"]
)
def test_a_comment_may_follow_on_a_magics_line(line: str) -> None:
    asked = parse_dist(line)
    assert asked is not None
    assert asked.n == 4


def test_a_hash_within_a_word_or_quotes_is_no_comment() -> None:
    asked = parse_distributed("--run a#1 -p note='run #2' # the second")
    assert asked is not None
    assert asked.run == "a#1"
    assert dict(asked.params) == {"note": "run #2"}


@pytest.mark.parametrize(
    ("line", "expression"),
    [
        ("peek model.weight.norm()", "model.weight.norm()"),
        ('peek  names["a b"] - 1  # one less', 'names["a b"] - 1  '),
        ("peek -loss", "-loss"),
    ],
)
def test_a_peek_takes_the_rest_of_its_line_as_it_was_typed(line: str, expression: str) -> None:
    asked = parse_dist(line)
    assert asked is not None
    assert asked.expression == expression


def test_a_change_takes_values_as_a_parameter_does() -> None:
    asked = parse_dist('change lr=1e-3 opt="sgd" betas=(0.9,0.99)')
    assert asked is not None
    assert dict(asked.values) == {"lr": 1e-3, "opt": "sgd", "betas": (0.9, 0.99)}
    with pytest.raises(UsageError, match=r"%dist change: .*: change lr takes a Python literal"):
        parse_dist("change lr=fast")


def test_a_peek_without_an_expression_is_refused() -> None:
    with pytest.raises(UsageError, match="%dist peek: missing: EXPR"):
        parse_dist("peek")


def test_rules_to_ignore_are_named_with_commas_and_a_wrong_one_is_refused() -> None:
    asked = parse_distributed("--ignore same-samples,unequal-start")
    assert asked is not None
    assert asked.ignore == ("same-samples", "unequal-start")
    with pytest.raises(UsageError, match="There is no rule 'same-sample'; did you mean same-sam"):
        parse_distributed("--ignore same-sample")


def test_checks_takes_the_name_of_a_rule_or_none() -> None:
    bare, one = parse_dist("checks"), parse_dist("checks same-samples")
    assert bare is not None
    assert one is not None
    assert (bare.rule, one.rule) == (None, "same-samples")
