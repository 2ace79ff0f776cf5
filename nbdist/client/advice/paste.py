"""The advised training as code: lines for a `%%distributed` cell, or for one plain process."""

from nbdist.study.advice import Candidate


def lines(
    best: Candidate,
    *,
    model: str,
    loss: str | None,
    optimizer: str,
    precision: str,
    global_batch: int,
    reference_batch: int,
    rule: str,
    warmup_steps: int,
) -> str:
    """Return code that trains as advised. It needs `dataset` and `lr`, and the names given here.

    Args:
        best: What is advised.
        model: The name of the function that makes the model.
        loss: The loss of `(outputs, targets)`, as it is written; None where outputs have one.
        optimizer: The optimizer's class, as it is written.
        precision: "bf16", "fp16" or "fp32".
        global_batch: Samples in a step.
        reference_batch: The samples for which `lr` was found.
        rule: How the rate follows the batch.
        warmup_steps: In which it rises.
    """
    policies = [f'nbdist.Precision("{precision}")'] if precision != "fp32" else []
    policies += ["nbdist.ActivationCheckpoint()"] if best.checkpoint else []
    if best.spread.pp > 1:
        policies.append(f'nbdist.Pipeline(schedule="{best.schedule}", microbatches={best.parts})')
    given = ", ".join((model, f'"{best.spread.layout}"', *policies))
    parts = 1 if best.spread.pp > 1 else best.parts
    scales = global_batch != reference_batch
    outputs = f"{loss}(outputs, y)" if loss else "outputs.loss"
    whole = f"lambda outputs, y: {outputs}" + (f" / {parts}" if parts > 1 else "")
    whole = loss if loss and parts == 1 else whole
    batch, step = ("x, y", "x, y") if loss else ("x", "x, None")
    found = [
        f"layout = nbdist.parallelize({given})",
        f"optimizer = layout.optimizer({optimizer}, lr=lr)",
    ]
    if scales:
        found += [
            "warmup = nbdist.scale_lr(",
            f"    optimizer, global_batch={global_batch}, reference_batch={reference_batch},",
            f'    rule="{rule}", warmup_steps={warmup_steps},',
            ")",
        ]
    found.append(f"loader = nbdist.loader(dataset, global_batch={global_batch // parts})")
    numbered = f"part, ({batch})" if loss else f"part, {batch}"
    found.append(
        f"for {numbered} in enumerate(loader, 1):" if parts > 1 else f"for {batch} in loader:"
    )
    body = []
    if parts > 1 and best.spread.fsdp == 1 and best.spread.dp * best.spread.cp > 1:
        body.append(f"layout.average(part % {parts} == 0)  # in the last part only")
    body.append(f"layout.step({step}, {whole})")
    stepping = ["optimizer.step()", "optimizer.zero_grad()"]
    if precision == "fp16":
        stepping[0] = "layout.scaler.step(optimizer)"
        stepping.insert(1, "layout.scaler.update()")
    stepping += ["warmup.step()"] if scales else []
    if parts > 1:
        body += [f"if part % {parts} == 0:", *(f"    {line}" for line in stepping)]
    else:
        body += stepping
    return "\n".join([*found, *(f"    {line}" for line in body)])
