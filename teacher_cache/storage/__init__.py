"""How the table lies on disk."""
