"""Several processes that train one model: DDP, FSDP2 (`fully_shard`) and HSDP.

A sample lives on one rank, so norms and factors are taken there; clipped sums are added over ranks, and the noise of an
element is a function of the step's key and of the element's number in the whole model. See docs/distributed.md.
"""
