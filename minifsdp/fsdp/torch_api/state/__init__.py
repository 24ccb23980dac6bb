"""The state of a wrapped model under its original names: whole, or in pieces that any number of ranks can load."""
