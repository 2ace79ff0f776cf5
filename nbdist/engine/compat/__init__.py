"""torch's private parts, touched here alone; each module's `check()` names what a torch has moved.

`groups/` and `torch_init` know process groups and their backends, `torch_hooks` and `cuda_graphs`
where tap and training look on, `torch_graph` what a loss is made of, `torch_live` and `heap` which
objects live, `torch_loaders` what a DataLoader does. How models are spread: `torch_modules`
(replicated), `torch_reducers`, `torch_sharded`, `torch_shards`, `torch_pipeline`,
`torch_transformer`, `torch_fakes`, `torch_wrappers`.
`checkpoints/` plans, writes and reads the files of checkpoints; `libraries/` knows Accelerate,
Trainer, DeepSpeed, datasets and transformers. A new module with a `check()` is listed in
`nbdist/doctor/software.py`.
"""
