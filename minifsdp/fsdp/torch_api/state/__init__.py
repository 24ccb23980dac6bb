"""The state of a wrapped model under its original names: whole, or in pieces that another number of ranks can load."""
