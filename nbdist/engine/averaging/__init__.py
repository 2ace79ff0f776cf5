"""Ranks that train apart and meet now and then: LocalSGD, DiLoCo, AsyncSGD."""
