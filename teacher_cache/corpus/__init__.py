"""Texts to encode: files, saved datasets, standard input and memory, read in flat memory."""
