"""The running session as a machine, and the advised layout measured on it."""

from statistics import median

from nbdist.client.advice.facts import Training, policies_of, precision_policies
from nbdist.client.session.session import Session
from nbdist.shared.errors import UsageError
from nbdist.study.accelerators import ASSUMED_SHARE, STEP_SHARE, Accelerator
from nbdist.study.advice import Candidate
from nbdist.study.links import Link
from nbdist.study.machine import Machine

_ALONE = Link(0.0, 1e12, "no link", "there is one rank")
# Of a rank: a GPU's, or its part of the host's.
_MEMORY = (
    "torch.cuda.get_device_properties(device).total_memory if device.type == 'cuda' else "
    "__import__('os').sysconf('SC_PAGE_SIZE') * __import__('os').sysconf('SC_PHYS_PAGES') "
    "// int(__import__('os').environ.get('LOCAL_WORLD_SIZE', world_size))"
)
_DEVICE = "torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'"
_NAME = "_nbdist_advised"
_MEASURE = (
    "__import__('nbdist.engine.layout.timed', fromlist=['timed'])"
    f".seconds_a_step(device, *globals().pop('{_NAME}'))"
)


def machine_of(session: Session) -> Machine:
    """Return the ranks of a session as a machine, by a probe: some seconds.

    Links are what each rank has while all of them send. Matmuls are taken for 75 % of a peak, as
    where nobody measured any; virtual devices compute all operations at one rate.

    Raises:
        UsageError: Ranks cannot be probed now.
    """
    found = session.probe()
    memory = min(session.run(_MEMORY, track=False).value_list)
    device = session.run(_DEVICE, ranks="0", track=False)[0].value
    is_virtual = session.options.virtual is not None
    if is_virtual:
        device += f" (emulated: {session.options.virtual})"
    rates = [dict(one) for one in (found.rates or {}).values()]
    dtypes = set.intersection(*(set(one) for one in rates))
    matmuls, step = (1.0, 1.0) if is_virtual else (ASSUMED_SHARE, STEP_SHARE)
    flops = {dtype: median(one[dtype] for one in rates) / matmuls for dtype in dtypes}
    bandwidth = 1e11  # of its memory: no formula asks for it
    chip = Accelerator(device, flops, memory, bandwidth, "", "measured here", matmuls, step)
    hosts = max(1, len({host for link in found.links for host in link.hosts}))
    inside = next((one.link for one in found.classes if one.name.startswith("inside")), _ALONE)
    between = next((one.link for one in found.classes if one.name.startswith("between")), None)
    ring = found.ring
    if ring is not None and hosts == 1:
        inside = ring
    per_host, left = divmod(session.world_size, hosts)
    if left:
        raise UsageError("Advice for this cluster needs hosts with as many ranks each.")
    return Machine(chip, per_host, hosts, inside, between)


def measured_s(
    session: Session, machine: Machine, best: Candidate | None, what: Training, steps: int = 5
) -> float:
    """Train some steps of a fresh model as advised, and return the seconds of the usual one.

    Raises:
        UsageError: Nothing fits, or the layout is for another number of ranks.
        RankError: The steps fail.
    """
    if best is None:
        raise UsageError("Nothing fits, so there is nothing to run.")
    ranks = best.spread.world_size
    if ranks not in (1, session.world_size):
        raise UsageError(
            f'The advised layout, "{best.spread.layout}", is for {ranks} ranks, and this cluster '
            f"has {session.world_size}.",
            do=f"%dist scale {ranks}",
        )
    in_pipeline = best.parts if best.spread.pp > 1 else 1
    given = (
        what.factory,
        what.of(best.micro_batch * in_pipeline),
        what.loss,
        best.spread.layout if ranks > 1 else "",
        (*precision_policies(machine), *policies_of(best)),
        what.optimizer,
        dict(what.options),
        best.parts // in_pipeline,
        steps,
    )
    chosen = "all" if ranks > 1 else "0"
    session.push({_NAME: given}, chosen)
    seconds: list[float] = session.run(_MEASURE, chosen, track=False).value_list
    return max(seconds)
