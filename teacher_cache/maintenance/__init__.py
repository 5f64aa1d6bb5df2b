"""Checks, repair and care of a cache folder."""
