"""The process of estimates: `python -m nbdist.engine.dry.child`, with requests on its stdin.

To each it says a line of JSON on stdout: what ranks hold, or why there is no estimate. What else is
printed, by the model's own code, goes to stderr. It ends with its stdin, and with its parent.
"""

import gc
import io
import json
import os
import pickle
import sys
from dataclasses import asdict
from typing import Any

from nbdist.shared.error_text import text_of
from nbdist.shared.errors import NBDistError
from nbdist.shared.processes.lifeline import end_with


def main() -> None:
    """Answer requests one after another, and leave nothing behind."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with(os.getppid())
    requests = io.BufferedReader(sys.stdin.buffer.raw)  # type: ignore[union-attr]
    while requests.peek(1):
        request = pickle.load(requests)
        sys.path[:] = request["path"]  # what the notebook imports is imported from there, too
        answers.write(json.dumps(_answer(request["buffers"])) + "\n")
        answers.flush()
        gc.collect()  # tensors in circles: freed amid an operation of the next one's, they end us
    os._exit(0)  # nothing here has to be put in order


def _answer(buffers: list[bytes]) -> dict[str, Any]:
    from nbdist.shared.payload import unpack

    try:
        asked = unpack(buffers)
    except Exception as error:
        what = f"What was given cannot be read in the process of the estimate: {text_of(error)}"
        why = "it imports by name what a module defines, from where this program imports"
        do = "give a lambda, or have the module's folder in sys.path"
        return {"error": [what, why, do], "kind": "TransferError"}
    try:
        return _estimate(asked)
    except NBDistError as error:
        return {"error": [error.what, error.why, error.do], "kind": type(error).__name__}
    except Exception as error:
        return {"error": [f"{type(error).__name__}: {text_of(error)}", "", ""], "kind": ""}


def _estimate(asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    from nbdist.engine.dry.step import Asked, kinds_of_ranks, measure, notes_of, shape_of

    asked["optimizer"] = asked["optimizer"] or torch.optim.AdamW
    one = Asked(**asked)
    ranks = [measure(one, rank) for rank in kinds_of_ranks(shape_of(one))]
    return {
        "layout": shape_of(one).name,
        "ranks": [asdict(rank.held) for rank in ranks],
        "model": ranks[0].model,
        "parameter_count": ranks[0].parameter_count,
        "notes": notes_of(shape_of(one)),
        "experts": ranks[0].experts,
    }


if __name__ == "__main__":
    main()
