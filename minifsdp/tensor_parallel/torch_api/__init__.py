"""Additional code for a drop-in replacement of torch.distributed.tensor.parallel: styles that no model here needs."""
