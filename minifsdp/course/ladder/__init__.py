"""One model trained on every rung, and the closed form of its bytes, which needs no torch."""
