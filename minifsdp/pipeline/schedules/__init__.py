"""Pipeline schedules: the order of each rank's forwards and backwards, one schedule a file."""
