"""torch's private parts, touched here alone; each module's `check()` names what a torch has moved.

`torch_groups`, `torch_dist` and `torch_init` (groups), `torch_hooks` (where tap and training look
on), `torch_live` and `heap` (which objects are alive), and how models are spread: `torch_modules`
(replicated), `torch_reducers`, `torch_sharded`, `torch_pipeline`, `torch_transformer`,
`torch_wrappers`.
`torch_checkpoint` plans, writes and reads the files of checkpoints. `third_parties` knows
Accelerate, Trainer and DeepSpeed. A new module with a `check()` is listed in
`nbdist/doctor/software.py`.
"""
