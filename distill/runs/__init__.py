"""What the commands run: one training, sweeps of many, the demo, and the lists of names."""
