"""Ranks that train independently and synchronize now and then: LocalSGD, DiLoCo, AsyncSGD."""
