"""Reading the table in shuffled order."""
