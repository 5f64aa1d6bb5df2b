"""The table on disk."""
