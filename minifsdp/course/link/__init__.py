"""An emulated interconnect, for machines whose own is too fast, or no network at all."""
