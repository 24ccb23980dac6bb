"""Additional code for a drop-in replacement of torch.distributed.pipelining: its schedules and files by name."""
