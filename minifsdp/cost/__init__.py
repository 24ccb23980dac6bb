"""A recipe's bytes, messages and idle time, from plain numbers. Neither torch nor what is predicted is imported.

Read in this order: model (shapes, and a rank's part of them), data_parallel, fsdp2, tensor_parallel, activations,
pipeline; then total, which composes them as `build` composes the model, and traffic; walk, shards and peak, which bound
all bytes at once; links and step, the seconds of messages on links of two speeds, and of a step.
"""
