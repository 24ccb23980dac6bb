"""An emulated interconnect, for machines whose own is too fast, or that have no network."""
