"""When units gather, free and reduce: each schedule is the one before, and one idea."""
