"""Additional code for a drop-in replacement of torch's FSDP2: arguments, methods, the user's own collectives."""
