"""State beside the names of cells that a script does not share with the notebook. Pure.

A cell that is left out may have seeded random numbers, or drawn some, or set how a library
computes; and ranks that were started anew had lost what cells before had given them. No name tells
of these.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from nbdist.client.export.blocks import Block

# Under these names cells know modules that another cell has imported.
_USUAL = {"np": "numpy", "cudnn": "torch.backends.cudnn"}
_OF_TORCH = r"(?:torch\.(?:\w+\.)*)?"
# Not those of a generator, such as `torch.Generator().manual_seed(0)`.
_SEEDS = re.compile(
    rf"{_OF_TORCH}(?:manual_seed|set_rng_state)(?:_all)?|torch\.(?:\w+\.)*seed(?:_all)?"
    r"|random\.(?:seed|setstate)|numpy\.random\.(?:seed|set_state)"
    r"|(?:\w+\.)*(?:(?:set|fix|setup)_(?:random_)?seeds?|seed_everything|seed_all)"
)
_SETTERS = re.compile(
    rf"{_OF_TORCH}(?:set_default_(?:dtype|device|tensor_type)|use_deterministic_algorithms"
    r"|set_deterministic_debug_mode|set_float32_matmul_precision|set_flush_denormal"
    r"|set_num_(?:interop_)?threads)"
)
# Names of what draws random numbers, or may: classes, for a layer draws its weights.
_DRAWING = re.compile(
    r"[A-Z](?!\w*(?:Error|Exception)$)\w*"
    r"|\w*(?:rand|shuffle|perm(?!ute)|init(?!ial|_process_group)|dropout|sample|normal|uniform)\w*"
)
MAY_DRAW = "random numbers"  # among what code sets: it moves the generators on
_SETTINGS = re.compile(r"torch\.backends\..+|os\.environ\[.+\]")


def settings_in(code: str) -> tuple[str, ...]:
    """Return what code calls or assigns that sets the state of libraries.

    Functions that seed, or set how is computed, and settings such as `torch.backends.cudnn.
    benchmark`; each by its whole name. Of what functions hold only those count that code calls.
    The last is `MAY_DRAW` where it may draw random numbers, as far as names tell.
    """
    tree = parsed(code)
    whole = _whole_names(tree)
    found: list[str] = []
    draws = False
    for node in running(tree):
        if isinstance(node, ast.Call):
            name = whole(node.func)
            is_setting = _SEEDS.fullmatch(name) or _SETTERS.fullmatch(name)
            found += [name] if is_setting else []
            draws = draws or bool(not is_setting and _DRAWING.fullmatch(_last_name(node.func)))
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [name for name in map(whole, targets) if _SETTINGS.fullmatch(name)]
    return (*dict.fromkeys(found), *([MAY_DRAW] if draws else []))


def _last_name(called: ast.expr) -> str:
    """Return `c` of `a.b.c`; "" of what has no name."""
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def settings_lost(blocks: Sequence[Block]) -> list[str]:
    """Return in sentences what blocks that are left out have set for those after them."""
    said = []
    for place, block in enumerate(blocks):
        is_followed = any(later.code for later in blocks[place + 1 :])
        if block.code or block.is_notebooks or not is_followed:
            continue
        seeds = [name for name in block.sets if _SEEDS.fullmatch(name)]
        others = [name for name in block.sets if name not in seeds and name != MAY_DRAW]
        be = "may be" if block.has_failed else "are"
        if seeds:
            said.append(f"{_who(block, seeds)}: random numbers after it {be} others in the script.")
        if others:
            said.append(f"{_who(block, others)}: the script leaves that as it was.")
    return said + _draws_lost(blocks)


def _draws_lost(blocks: Sequence[Block]) -> list[str]:
    """Return in a sentence which blocks that are left out may have drawn after a script's seed."""
    numbers: list[int] = []
    waiting: list[int] = []  # nothing of the script has run since
    is_seeded = False
    for block in blocks:
        seeds = any(_SEEDS.fullmatch(name) for name in block.sets)
        if block.code:
            numbers += [] if seeds else waiting  # it begins anew
            waiting = []
            is_seeded = is_seeded or seeds
        elif seeds:
            is_seeded = False  # which is told by itself
        elif is_seeded and MAY_DRAW in block.sets and not (block.is_notebooks or block.pushes):
            waiting.append(block.number)
    if not numbers:
        return []
    who, them = (
        (f"Cell {numbers[0]}, which is left out,", "it")
        if len(numbers) == 1
        else (f"Cells {', '.join(map(str, numbers))}, which are left out,", "them")
    )
    return [f"{who} may have drawn random numbers: those after {them} may be others in the script."]


def started_anew(commands: Iterable[tuple[int, str]], blocks: Sequence[Block]) -> list[str]:
    """Return in sentences where ranks began anew, and a script's cells go on.

    Args:
        commands: `start`, `stop` and `restart` of all ranks, each with the number of its cell.
            The numbers tell the order: a cell that has run again stands at its first place.
        blocks: The script's.
    """
    numbers = {block.number for block in blocks if block.code}
    after: list[int] = []
    was_stopped = False
    for number, command in sorted(commands, key=lambda one: one[0]):
        before = [n for n in numbers if n < number]
        is_anew = command == "restart" or (command == "start" and was_stopped)
        if is_anew and before and len(before) < len(numbers):
            after.append(max(before))
        was_stopped = command == "stop" or (was_stopped and command != "start")
    return [
        f"The ranks were started anew after cell {number}: in the script, what the cells up to it"
        " have set is still there."
        for number in dict.fromkeys(after)
    ]


def parsed(code: str) -> ast.Module:
    """Return code's tree; an empty one of what is no Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def running(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what runs with a cell; of functions only those that it calls by their names."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {node.func.id for node in nodes if isinstance(node.func, ast.Name)}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in called:
            continue
        yield node
        waiting += reversed([*ast.iter_child_nodes(node)])  # the first comes next


def _who(block: Block, names: Sequence[str]) -> str:
    """Return who has done it: `Cell 3, which is left out, calls torch.manual_seed`."""
    calls = [name for name in names if not _SETTINGS.fullmatch(name)]
    assigned = [name for name in names if name not in calls]
    has_called, has_set = ("called", "set") if block.has_failed else ("calls", "sets")
    did = [f"{has_called} {', '.join(calls)}"] if calls else []
    did += [f"{has_set} {', '.join(assigned)}"] if assigned else []
    how = "which has failed, may have" if block.has_failed else "which is left out,"
    return f"Cell {block.number}, {how} {' and '.join(did)}"


def _whole_names(tree: ast.Module) -> Callable[[ast.expr], str]:
    """Return what gives an expression's text, with the whole name of the module that it is of."""
    known = {**_USUAL}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            of = node.module
            known |= {alias.asname or alias.name: f"{of}.{alias.name}" for alias in node.names}

    def whole(expression: ast.expr) -> str:
        text = ast.unparse(expression)
        root = re.match(r"\w*", text)
        assert root is not None
        return known.get(root[0], root[0]) + text[root.end() :]

    return whole
