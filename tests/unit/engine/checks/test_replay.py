"""What a rank answers of a step that it has kept."""

import pytest
import torch.distributed as dist

from nbdist.engine.checks import replay
from nbdist.engine.steps import guard
from nbdist.engine.steps.kept_step import KeptStep
from nbdist.shared import plain


def test_an_answer_about_many_modules_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: dict[str, float | None] = {f"block.{n}.{'x' * 80}": float(n) for n in range(4000)}
    norms |= {f"bad.{n}.{'x' * 80}": None for n in range(4000)}
    step = KeptStep(1, 3, 0.5, norms, False, lambda: None)
    monkeypatch.setattr(guard.here.evidence, "steps", [step])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, mine: into.__setitem__(0, mine))
    answer = replay.replay(None, False, {})
    assert (answer["modules"], answer["bad_modules"], answer["ran"]) == (8000, 4000, False)
    assert answer["why_not"] == "its model is not known, or is gone"
    assert list(answer["gradients"].values())[:64] == [None] * 64
    assert max(norm or 0 for norm in answer["gradients"].values()) == 3999
    assert plain.is_plain(answer)
