"""Track training in MLflow: one run a training cell, for all its ranks.

    run     what the session calls: a Tracker, a TrackedRun a cell      (kernel)
    begin   decides what a run is; writing writes it                    (kernel)
    story   what a run can be made again from, with provenance          (kernel)
    study   the run under which those of a sweep are nested             (kernel)
    series  records in, points out; flat: one step as a few numbers     (pure)
    curves  what stays of a run to compare it by, over the same steps   (pure)
    spool   a run on disk: its journal, and how far MLflow has it       (both processes)
    shipping/  sends the spool to MLflow, by a process of its own; MLflow's UI
    past/   `%dist runs`, a run by its name, and what differs between runs

Only `shipping/ship` imports mlflow, so importing this package costs milliseconds.
"""
