"""`nbdist.loader`: torch's DataLoader, with every sample once an epoch whatever the ranks.

The samples' order follows from (seed, epoch) alone and is cut into global batches as `batches`
says. Nothing in this depends on a rank but which part it takes (`shards`), so the same global
batches come on any number of ranks, and the position is one number (`position`): samples *consumed*
by all ranks together. After a fault each loader goes back to the last boundary, and when the failed
cell is run again its loops go on there (`resume`, by `passes`).
"""
