"""Benchmarks are contests: torch's parallelism and ours take a step in turn, in one process group, by one clock.

contest.py      the contest, its clocks, and what follows from its times: costs, ratios, limits
contestants.py  ways to train a model of blocks
start.py        `minifsdp bench`: a GPT's step by wall time, its memory, and a prediction on paper
overhead.py     the host's CPU time of wrappers         tensor.py    that of tensor parallelism, and its steps
pipeline.py     the CPU time of a pipeline's thread     scaling.py   steps, bytes and messages beside their laws
"""
