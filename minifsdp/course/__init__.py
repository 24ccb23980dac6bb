"""What serves the course: starting ranks, counting bytes, drawing, the command line. Upstairs imports nothing of it."""
