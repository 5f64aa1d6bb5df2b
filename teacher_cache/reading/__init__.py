"""Read a cached corpus in shuffled order."""
