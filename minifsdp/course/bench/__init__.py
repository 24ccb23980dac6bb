"""The step benchmark: torch's data parallelism and ours on one model, a step of each in turn, in one process group."""
