"""Who is slow, and why: on made records, against what was put into them."""

import time

import numpy as np
import pytest

from nbdist.client.metrics.analysis.advice import advice_for
from nbdist.client.metrics.analysis.stragglers import EVERY_S, StragglerDetector, StragglerReport
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.shared.packed import Calls, Template
from nbdist.shared.wire import Record

CLEAN = {
    "data_s": 0.001,
    "forward_s": 0.006,
    "backward_own_s": 0.010,
    "optimizer_s": 0.002,
    "other_s": 0.001,
    "samples": 32.0,
}
PARTS = [name for name in CLEAN if name.endswith("_s")]


class Machine:
    """Makes the records of ranks that wait for the slowest of them in each step.

    They do so in backward, as DDP does, or `waits_in` forward, as FSDP also does.
    """

    def __init__(self, ranks: int, seed: int = 0, waits_in: str = "backward") -> None:
        self.ranks = range(ranks)
        self.waits_in = waits_in
        self.judge = StragglerDetector()
        self.step = 0
        self.records: list[Record] = []
        self._noise = np.random.default_rng(seed)
        self._seq = 0

    def steps(
        self,
        count: int,
        slow: dict[int, dict[str, float]] | None = None,
        *,
        noise: float = 0.02,
        scale: float = 1.0,
        transfer_s: float = 0.002,
    ) -> None:
        """Make steps; `slow` adds to a rank's parts. `noise` is the spread of a part's time."""
        slow = slow or {}
        told = [slow.get(rank, {}) for rank in self.ranks]
        typical = [[CLEAN[name] + more.get(name, 0.0) for name in PARTS] for more in told]
        # Mostly near, at times far: as of a machine that does something else.
        spread = abs(self._noise.standard_t(2, (count, len(self.ranks), len(PARTS))))
        works = scale * np.array(typical) * (1 + noise * spread)
        own = works.sum(axis=2)
        comm = (own.max(axis=1, keepdims=True) - own + transfer_s).tolist()
        for work, comm_s in zip(works.tolist(), comm, strict=True):
            self.step += 1
            for rank in self.ranks:
                parts = dict(zip(PARTS, work[rank], strict=True))
                self._tell(rank, parts, told[rank], comm_s[rank])

    def _tell(
        self, rank: int, work: dict[str, float], more: dict[str, float], comm_s: float
    ) -> None:
        own_s = sum(work.values())
        values = {name: s for name, s in work.items() if name != "backward_own_s"}
        values["backward_s"] = work["backward_own_s"]
        values["compute_s"] = work["forward_s"] + work["backward_own_s"]
        values[f"{self.waits_in}_s"] += comm_s
        values["forward_comm_s"] = comm_s if self.waits_in == "forward" else 0.0
        values["comm_s"] = comm_s
        values["step_s"] = own_s + comm_s
        values["samples"] = CLEAN["samples"] + more.get("samples", 0.0)
        values["starved_s"] = more.get("starved_s", 0.0)
        values["cpu_s"] = own_s - values["starved_s"] - more.get("idle_s", 0.0)
        self.add("step", rank, values)

    def add(
        self, kind: str, rank: int, values: dict[str, float], detail: Calls | None = None
    ) -> None:
        """Give the judge one record."""
        self._seq += 1
        self.records.append(Record(rank, self._seq, kind, self.step, 0, values, detail))
        self.judge.add(self.records[-1])

    def links(
        self,
        busy_s: dict[int, float],
        rtt_s: dict[int, float] | None = None,
        sent_bytes: float = 1e8,
    ) -> None:
        """Tell of a ring in which each rank sent so much to the next one; it called that one."""
        for rank in self.ranks:
            after, before = (rank + 1) % len(self.ranks), (rank - 1) % len(self.ranks)
            ours, theirs = f"{after}@10.0.0.1:{5000 + rank}", f"@10.0.0.1:{5000 + before}"
            rtt = (rtt_s or {}).get(rank, 1e-4)
            told = {"sent_bytes": sent_bytes, "busy_s": busy_s.get(rank, 0.025), "rtt_s": rtt}
            back = {"sent_bytes": 4e3, "busy_s": 0.3, "rtt_s": 0.005}
            self.add(
                "links",
                rank,
                {f"{ours}.{k}": v for k, v in told.items()}
                | {f"{theirs}.{k}": v for k, v in back.items()},
            )

    def verdict(self) -> Straggler:
        """Return the only verdict."""
        (verdict,) = self.judge.verdicts()
        return verdict


@pytest.mark.parametrize("waits_in", ["forward", "backward"])
@pytest.mark.parametrize(
    ("cause", "more", "sentence"),
    [
        (
            "data",
            {"data_s": 0.030, "idle_s": 0.030},
            (
                "Rank 2 takes 2.5 times as long per step as its peers, without communication: "
                "its data loading "
                "takes 31 ms per step, 1.0 ms on the others."
            ),
        ),
        (
            "optimizer",
            {"optimizer_s": 0.010},
            "Rank 2 is 50 % slower: its optimizer takes 12 ms per step, 2.0 ms on the others.",
        ),
        (
            "other",
            {"other_s": 0.010},
            (
                "Rank 2 is 50 % slower: the rest of its loop (such as logging or evaluation) takes "
                "11 ms per step, 1.0 ms on the others."
            ),
        ),
        (
            "forward",
            {"forward_s": 0.006},
            (
                "Rank 2 is 30 % slower: it computes longer, forward takes 12 ms per step, 6.0 "
                "ms on "
                "the others, with as much to do (a slower or hotter core?)."
            ),
        ),
        (
            "forward",
            {"forward_s": 0.010, "idle_s": 0.010},
            (
                "Rank 2 is 50 % slower: its forward takes 16 ms per step, 6.0 ms on the "
                "others, and "
                "in it the rank is idle for 10 ms longer (it sleeps, or waits for something that "
                "is not communication)."
            ),
        ),
        (
            "backward",
            {"backward_own_s": 0.010, "idle_s": 0.010},
            (
                "Rank 2 is 50 % slower: its backward takes 20 ms per step, 10 ms on the "
                "others, and "
                "in it the rank is idle for 10 ms longer (it sleeps, or waits for something that "
                "is not communication)."
            ),
        ),
        (
            "idle",
            {
                "data_s": 0.004,
                "forward_s": 0.004,
                "backward_own_s": 0.004,
                "optimizer_s": 0.004,
                "idle_s": 0.016,
            },
            (
                "Rank 2 is 80 % slower: it does nothing for 16 ms per step, 0 ms on the others (it "
                "sleeps, or waits for something that is not communication)."
            ),
        ),
        (
            "starved",
            {"forward_s": 0.003, "backward_own_s": 0.006, "starved_s": 0.009},
            (
                "Rank 2 shares its core: it was ready to run and had to wait 9.0 ms of every 31 ms "
                "step, 0 ms on the others."
            ),
        ),
        (
            "forward",  # who computes more waits more often for a core
            {"forward_s": 0.015, "starved_s": 0.009},
            (
                "Rank 2 is 75 % slower: it computes longer, forward takes 21 ms per step, 6.0 "
                "ms on "
                "the others, and in it the rank waits 9.0 ms longer for a core."
            ),
        ),
        (
            "batch",
            {"forward_s": 0.006, "backward_own_s": 0.010, "samples": 32.0},
            "Rank 2 gets bigger batches: 64 samples per step against 32.",
        ),
    ],
)
def test_a_slow_rank_is_named_with_its_cause_and_the_numbers(
    cause: str, more: dict[str, float], sentence: str, waits_in: str
) -> None:
    machine = Machine(4, waits_in=waits_in)
    machine.steps(180, {2: more}, noise=0.0)
    verdict = machine.verdict()
    own, added = (sum(told.get(name, 0.0) for name in PARTS) for told in (CLEAN, more))
    assert (verdict.rank, verdict.cause) == (2, cause)
    assert verdict.share == pytest.approx(added / own, rel=0.01)
    assert verdict.sentence == sentence


@pytest.mark.parametrize("waits_in", ["forward", "backward"])
@pytest.mark.parametrize("part", PARTS)
def test_the_right_rank_and_cause_are_named_under_noise_whatever_is_slow(
    part: str, waits_in: str
) -> None:
    for seed in range(4):
        machine = Machine(4, seed, waits_in)
        machine.steps(60, {seed: {part: 0.008, "idle_s": 0.008}}, noise=0.1)
        assert (machine.verdict().rank, machine.verdict().cause) == (seed, part.partition("_")[0])


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("scale", [0.05, 1.0])  # steps of 1 ms and of 22
def test_a_thousand_clean_steps_are_silent_however_noisy(noise: float, scale: float) -> None:
    machine = Machine(4)
    for _ in range(50):
        machine.steps(20, noise=noise, scale=scale)
        assert machine.judge.verdicts() == ()


def test_fewer_than_fifty_slow_steps_are_silent_and_fifty_are_not() -> None:
    machine = Machine(4)
    slow = {1: {"forward_s": 0.010}}
    machine.steps(200)
    for made in range(2, 62, 2):
        machine.steps(2, slow)
        is_said = bool(machine.judge.verdicts())
        assert not is_said or made > 40
    assert machine.verdict().rank == 1


@pytest.mark.parametrize("long", [1, 10, 20])
def test_a_short_disturbance_is_silent_while_it_is_in_the_window(long: int) -> None:
    machine = Machine(4)
    machine.steps(60)
    machine.steps(long, {1: {"data_s": 0.200}})
    for _ in range(12):
        assert machine.judge.verdicts() == ()
        machine.steps(5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize(("every", "long_s"), [(10, 0.2), (5, 0.3), (7, 0.2)])
def test_what_one_rank_does_every_few_steps_is_named_with_its_mean(
    every: int, long_s: float, noise: float, ranks: int
) -> None:
    machine = Machine(ranks)
    for _ in range(130 // every):
        machine.steps(every - 1, noise=noise)
        machine.steps(1, {0: {"other_s": long_s, "idle_s": long_s}}, noise=noise)
    verdict = machine.verdict()
    assert (verdict.rank, verdict.cause) == (0, "other")
    window = [r for r in machine.records if r.step > machine.step - 50]
    own = [
        np.mean([r.values["step_s"] - r.values["comm_s"] for r in window if r.rank == rank])
        for rank in range(ranks)
    ]
    assert verdict.share == pytest.approx(own[0] / np.median(own[1:]) - 1, rel=0.2)
    assert machine.judge.own_ms[0] == pytest.approx(1e3 * own[0], rel=0.2)
    others_ms = np.median([machine.judge.own_ms[rank] for rank in range(1, ranks)])
    assert verdict.share == pytest.approx(machine.judge.own_ms[0] / others_ms - 1)
    assert ", on average: the rest of its loop" in verdict.sentence


def test_a_pause_of_a_short_step_says_nothing_of_how_long_the_others_are() -> None:
    machine = Machine(2)
    machine.steps(300, noise=0.3, scale=0.05)
    machine.steps(1, {1: {"other_s": 40.0}}, scale=0.05)
    for _ in range(60):
        machine.steps(1, noise=0.3, scale=0.05)
        assert machine.judge.verdicts() == ()


def test_pauses_in_each_fifth_that_are_now_long_and_now_short_are_silent() -> None:
    machine = Machine(2)
    for long_s in (0.05, 0.4, 0.06, 0.3, 0.08, 0.5, 0.05, 0.2):
        machine.steps(9)
        machine.steps(1, {1: {"other_s": long_s, "idle_s": long_s}})
        assert machine.judge.verdicts() == ()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_with_pauses_so_long_that_means_rise_is_silent(ranks: int) -> None:
    machine = Machine(ranks, seed=ranks)
    for _ in range(40):
        machine.steps(25, noise=1.0)
        assert machine.judge.verdicts() == ()


def test_the_same_cause_at_unlike_ranks_is_compared_with_those_that_have_none() -> None:
    machine = Machine(5)
    slow = {0: {"data_s": 0.040}, 1: {"data_s": 0.060}, 2: {"data_s": 0.060}}
    machine.steps(100, slow, noise=0.0)
    assert [(v.rank, v.share) for v in machine.judge.verdicts()] == [
        (1, pytest.approx(3.0)),
        (2, pytest.approx(3.0)),
        (0, pytest.approx(2.0)),
    ]


def test_who_is_idle_elsewhere_too_is_said_to_be_so_in_the_part_no_longer_than_it_takes() -> None:
    machine = Machine(2)
    slow = {"forward_s": 0.020, "other_s": 0.013, "idle_s": 0.033}
    machine.steps(100, {1: slow}, noise=0.0)
    assert machine.verdict().sentence == (
        "Rank 1 takes 2.6 times as long per step as its peers, without communication: its "
        "forward takes 26 ms per "
        "step, 6.0 ms on the others, and in it the rank is idle for 20 ms longer (it sleeps, or "
        "waits for something that is not communication)."
    )
    assert machine.verdict().within == "idle"
    # A rank that computes less besides is idle longer than its part is.
    machine = Machine(2)
    machine.steps(100, {1: {"forward_s": 0.020, "idle_s": 0.033}}, noise=0.0)
    assert "the rank is idle for 20 ms longer" in machine.verdict().sentence


def test_forward_is_never_longer_than_all_that_was_computed() -> None:
    machine = Machine(2)
    for _ in range(100):
        machine.step += 1
        for rank in range(2):
            own_s = 0.03 if rank else 0.01
            values = {"step_s": 0.04, "comm_s": 0.04 - own_s, "compute_s": own_s, "cpu_s": own_s}
            machine.add("step", rank, values | {"forward_s": 0.015 + rank * 0.015})
    sentence = machine.verdict().sentence
    assert "takes 30 ms per step, 10 ms on the others" in sentence


def test_a_bigger_batch_that_no_loader_tells_of_is_more_to_do_and_no_lack_of_a_core() -> None:
    machine = Machine(2)
    for _ in range(200):  # 28 times the work waits 28 times as long for the cores that both share
        machine.step += 1
        for rank, times in ((0, 1), (1, 28)):
            own_s, starved_s = 0.008 * times, 0.0069 * times
            values = {"step_s": 0.230, "comm_s": 0.230 - own_s, "compute_s": own_s}
            values |= {"forward_s": own_s / 4, "starved_s": starved_s, "cpu_s": own_s - starved_s}
            machine.add("step", rank, values)
    verdict = machine.verdict()
    assert (verdict.rank, verdict.cause) == (1, "backward")
    assert "it computes longer, backward takes 168 ms per step" in verdict.sentence
    assert verdict.within is None
    assert verdict.sentence.endswith(", as it has more to do or a slower core.")


def with_experts(loads: list[float], own_s: list[float], idle_s: float = 0.0) -> Machine:
    """Return steps of ranks with so many times an even share of tokens, which work so long."""
    machine = Machine(len(loads))
    for _ in range(60):
        machine.step += 1
        for rank, (load, work_s) in enumerate(zip(loads, own_s, strict=True)):
            values = {"step_s": 0.5, "comm_s": 0.5 - work_s, "compute_s": work_s}
            values |= {"forward_s": work_s / 3, "starved_s": 0.0}
            values["cpu_s"] = work_s - (idle_s if load == max(loads) else 0.0)
            machine.add("step", rank, values | {"expert_tokens": 400 * load, "expert_even": 400.0})
    return machine


def test_a_rank_whose_experts_get_more_tokens_is_named_with_its_share() -> None:
    verdict = with_experts([0.6, 1.4], [0.1, 0.18]).verdict()
    assert (verdict.rank, verdict.cause, verdict.within) == (1, "experts", None)
    assert verdict.sentence == (
        "Rank 1 is 80 % slower: it computes longer, as its experts get 1.4 times an even share of "
        "the tokens, 0.6 times on the others (560 a step against 240)."
    )
    assert "balance the router" in advice_for(verdict).do
    assert with_experts([0.0, 2.0], [0.01, 0.4]).verdict().cause == "experts"


def test_experts_are_no_cause_where_they_explain_less_than_half() -> None:
    # 22 % more tokens, and twice as slow; all of it idle; and no more tokens than the others.
    assert with_experts([0.9, 1.1], [0.1, 0.2]).verdict().cause == "backward"
    assert with_experts([0.6, 1.4], [0.1, 0.18], idle_s=0.08).verdict().within == "idle"
    assert with_experts([1.0, 1.0], [0.1, 0.18]).verdict().cause == "backward"


def test_load_that_all_ranks_have_is_silent() -> None:
    machine = Machine(4)
    machine.steps(60)
    machine.steps(100, {rank: {"data_s": 0.050, "starved_s": 0.040} for rank in range(4)})
    assert machine.judge.verdicts() == ()


def test_a_rank_that_is_starved_like_all_others_is_slow_by_what_it_does_itself() -> None:
    machine = Machine(4)
    all_alike = {"forward_s": 0.008, "starved_s": 0.008}
    slow = {rank: dict(all_alike) for rank in range(4)}
    slow[3]["data_s"] = 0.020
    machine.steps(100, slow)
    assert (machine.verdict().rank, machine.verdict().cause) == (3, "data")


def test_lack_of_a_core_is_said_where_it_lasts_and_the_machine_is_not_full() -> None:
    starved = {"forward_s": 0.010, "starved_s": 0.010}
    machine = Machine(4)
    machine.steps(150)
    machine.steps(80, {1: starved})  # less than three seconds
    assert machine.judge.verdicts() == ()
    machine.steps(80, {1: starved})
    assert (machine.verdict().rank, machine.verdict().cause) == (1, "starved")
    machine.steps(200, {1: starved, 3: {"forward_s": 0.004, "starved_s": 0.004}})
    assert machine.judge.verdicts() == ()


def test_what_is_less_than_all_wait_for_cores_is_said_where_it_lasts() -> None:
    machine = Machine(4)
    slow = {rank: {"forward_s": 0.012, "starved_s": 0.012} for rank in range(4)}
    machine.steps(200, slow)
    slow[3] = {**slow[3], "backward_own_s": 0.010, "idle_s": 0.010}
    machine.steps(90, slow)  # less than five seconds
    assert machine.judge.verdicts() == ()
    machine.steps(90, slow)
    assert (machine.verdict().rank, machine.verdict().cause) == (3, "backward")


def test_lateness_that_is_no_one_things_is_silent() -> None:
    machine = Machine(4)
    for _ in range(20):  # each part is late in one step of five
        for part in PARTS:
            machine.steps(1, {1: {part: 0.010}})
    assert machine.judge.verdicts() == ()


def test_a_link_whose_end_lacks_a_core_is_silent() -> None:
    machine = Machine(4)
    for _ in range(5):
        machine.steps(20, {3: {"starved_s": 0.060}}, transfer_s=0.1)
        machine.links({3: 1.8})
    assert machine.judge.verdicts() == ()


def test_the_first_steps_of_a_cell_do_not_count() -> None:
    machine = Machine(2)
    machine.steps(2, {0: {"forward_s": 50.0}})
    machine.steps(51, {0: {"forward_s": 0.010}})
    assert machine.verdict().share == pytest.approx(0.5, abs=0.05)


def test_where_communication_is_most_of_a_step_a_little_more_work_is_silent() -> None:
    machine = Machine(4)
    machine.steps(100, {1: {"forward_s": 0.006}}, transfer_s=0.200)
    assert machine.judge.verdicts() == ()


def test_a_verdict_ends_with_its_cause_and_remembers_since_when_it_held() -> None:
    machine = Machine(4)
    machine.steps(60)
    for _ in range(20):
        machine.steps(10, {1: {"forward_s": 0.010}})
        machine.judge.verdicts()
    assert 50 <= machine.verdict().since_step <= 80
    machine.steps(40)
    assert machine.judge.verdicts() == ()


def test_two_slow_ranks_of_eight_are_both_named_the_slower_first() -> None:
    machine = Machine(8)
    machine.steps(100, {1: {"data_s": 0.010}, 6: {"forward_s": 0.020}})
    assert [(v.rank, v.cause) for v in machine.judge.verdicts()] == [(6, "forward"), (1, "data")]


def test_a_rank_that_stopped_stepping_is_not_waited_for() -> None:
    machine = Machine(3)
    machine.steps(60)
    machine.ranks = range(2)
    machine.steps(1100, {0: {"forward_s": 0.010}})
    assert machine.verdict().rank == 0


def template(kind: str, ranks: tuple[int, ...], peer: int | None = None) -> Template:
    return Template(kind, "g", "group", ranks, 4, "float32", "", peer)


def calls(*templates: Template) -> Calls:
    from array import array

    return Calls(0, dict(enumerate(templates)), array("I"), array("I"))


def test_stages_of_a_pipeline_are_compared_with_their_data_parallel_mates_alone() -> None:
    machine = Machine(4)  # stage 0 on ranks 0 and 1, stage 1, with more to do, on 2 and 3
    everyone = template("barrier", (0, 1, 2, 3))
    for rank, mate, stage in ((0, 2, (0, 1)), (1, 3, (0, 1)), (2, 0, (2, 3)), (3, 1, (2, 3))):
        messages = template("send", (0, 1, 2, 3), mate)
        machine.add("calls", rank, {}, calls(messages, template("all_reduce", stage), everyone))
    second_stage: dict[int, dict[str, float]] = {rank: {"forward_s": 0.020} for rank in (2, 3)}
    machine.steps(100, second_stage)
    assert machine.judge.verdicts() == ()
    machine.steps(100, {**second_stage, 1: {"data_s": 0.010}})
    assert (machine.verdict().rank, machine.verdict().cause) == (1, "data")


def test_a_link_that_carries_less_is_named_by_who_sends() -> None:
    machine = Machine(4)
    for _ in range(5):
        machine.steps(20, transfer_s=0.1)
        machine.links({3: 1.8})
    verdict = machine.verdict()
    assert (verdict.rank, verdict.cause) == (3, "link")
    assert verdict.sentence == (
        "The link of rank 3 is slow: 55.6 MB/s against at least 4.00 GB/s on the others "
        "(from rank 3 to rank 0)."
    )
    # Of the answers, which are small, no rate is told either.
    assert machine.judge.rates()[3] == {0: pytest.approx(1e8 / 1.8)}


def test_a_link_whose_other_end_reads_late_is_silent() -> None:
    machine = Machine(4)
    for _ in range(5):
        machine.steps(20, {0: {"data_s": 0.1}}, transfer_s=0.001)  # rank 0 hardly waits
        machine.links({3: 1.8})
    assert [v.cause for v in machine.judge.verdicts()] == ["data"]
    machine = Machine(4)
    for i in range(8):
        machine.steps(20, transfer_s=0.1)
        machine.links({3: (0.5, 1.8)[i % 2]})  # now more and now less
        assert machine.judge.verdicts() == ()


def test_a_link_whose_end_waits_for_a_core_for_a_part_of_the_time_is_silent() -> None:
    machine = Machine(2)
    for _ in range(5):
        machine.steps(20, {1: {"starved_s": 0.03}}, transfer_s=0.1)
        machine.links({0: 1.8})
    assert machine.judge.verdicts() == ()


def test_a_rank_whose_connection_delays_both_ways_is_named_and_not_its_neighbours() -> None:
    for ranks in (3, 4):
        machine = Machine(ranks)
        for _ in range(5):
            machine.steps(20, transfer_s=0.1)
            machine.links({0: 0.9, 1: 1.0}, {0: 0.02, 1: 0.02})
        assert machine.verdict().rank == 1
        assert "a round trip takes 20 ms against 0.1 ms" in machine.verdict().sentence


def test_links_are_silent_while_they_are_noisy_hidden_all_alike_or_slow_for_a_moment() -> None:
    noise = np.random.default_rng(0)
    machine = Machine(4)
    for _ in range(20):
        machine.steps(20, transfer_s=0.01)
        machine.links({rank: 0.1 * (1 + noise.exponential()) for rank in machine.ranks})
        assert machine.judge.verdicts() == ()
    for _ in range(5):
        machine.steps(20, transfer_s=0.1)
        machine.links(dict.fromkeys(machine.ranks, 1.8))  # all alike
    assert machine.judge.verdicts() == ()
    for _ in range(5):
        machine.steps(20, transfer_s=0.001)
        machine.links({3: 0.3})  # slow, and waited for by nobody
    assert machine.judge.verdicts() == ()
    machine.steps(20, transfer_s=0.1)
    machine.links({1: 1.8})
    assert machine.judge.verdicts() == ()


@pytest.mark.parametrize(("sent_bytes", "said"), [(20 * 50e3, []), (20 * 100e3, [3])])
def test_links_that_carry_little_a_step_are_not_judged(sent_bytes: float, said: list[int]) -> None:
    machine = Machine(4)
    for _ in range(5):
        machine.steps(20, transfer_s=0.1)
        machine.links({3: 1.8}, sent_bytes=sent_bytes)
    assert [v.rank for v in machine.judge.verdicts()] == said


def seconds_to_judge(ranks: int) -> float:
    """Return the least CPU time of three judgements, of which each names rank 7."""

    def judge() -> float:
        machine = Machine(ranks)
        machine.steps(60, {7: {"forward_s": 0.010}})
        began = time.thread_time()
        assert machine.verdict().rank == 7
        return time.thread_time() - began

    return min(judge() for _ in range(3))


def test_the_time_to_judge_does_not_grow_with_the_square_of_the_ranks() -> None:
    assert seconds_to_judge(64) < 3 * 8 * seconds_to_judge(8)


def told_of(said: StragglerReport) -> list[int]:
    return [verdict.rank for verdict in said.newest]


def test_a_judge_is_asked_once_a_second_and_at_the_end() -> None:
    machine = Machine(4)
    machine.steps(60, {1: {"data_s": 0.020}})
    said = StragglerReport()
    said.take([], 0.0, is_last=False)
    said.take(machine.records, EVERY_S / 2, is_last=False)
    assert told_of(said) == []
    said.take([], EVERY_S, is_last=False)
    assert told_of(said) == [1]
    said = StragglerReport()
    said.take([], 0.0, is_last=False)
    said.take(machine.records, EVERY_S / 2, is_last=True)
    assert told_of(said) == [1]


def test_a_judge_that_fails_is_logged_once_and_falls_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(4)
    machine.steps(60, {1: {"data_s": 0.020}})
    said = StragglerReport()
    said.take(machine.records, 0.0, is_last=False)
    monkeypatch.setattr(StragglerDetector, "verdicts", lambda judge: 1 // 0)
    for now_s in (1.0, 2.0, 3.0):
        said.take(machine.records, now_s, is_last=False)
        assert told_of(said) == []
    assert [record.exc_info is not None for record in caplog.records] == [True]
