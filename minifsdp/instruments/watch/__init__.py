"""Measurement: live bytes by purpose, collectives, and the timeline of a step."""
