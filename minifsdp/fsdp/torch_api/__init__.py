"""Additional code for a drop-in replacement of torch's FSDP: arguments, policies, deferred initialization, state."""
