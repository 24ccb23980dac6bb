"""Additional code for a drop-in replacement of torch's DDP: arguments, join, hooks, sparse gradients, static graphs."""
