"""The cost of every method, measured: time and memory of the trainer's own steps, side by side."""
