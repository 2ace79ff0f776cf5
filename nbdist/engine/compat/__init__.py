"""torch's private parts, touched here alone; each module's `check()` names what a torch has moved.

`torch_compat` (groups), `torch_hooks` (where tap and training look on), `torch_live` (which objects
are alive), and how models are spread: `torch_modules` (replicated), `torch_reducers`,
`torch_sharded`, `torch_pipeline`.
"""
