"""Texts to encode: files and other sources, read with flat memory."""
