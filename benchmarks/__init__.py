"""Benchmarks: scripts that measure this project beside its alternatives in one run."""
