"""Files of others, read with care; files of ours, never half written."""
