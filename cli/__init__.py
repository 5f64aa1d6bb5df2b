"""The two commands. Standard library and click at module level, nothing heavier."""
