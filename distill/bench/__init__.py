"""Measured step time and memory of every method, on the trainer's real steps, side by side."""
