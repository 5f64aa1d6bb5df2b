"""Estimates of a training step's memory, FLOPs and time, made before anything runs."""
