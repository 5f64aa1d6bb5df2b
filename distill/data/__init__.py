"""From rows of a cache to batches."""
