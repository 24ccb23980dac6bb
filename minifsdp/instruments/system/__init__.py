"""Files and processes of this machine. Nothing here needs torch."""
