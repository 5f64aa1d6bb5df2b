"""The table: rows are distinct texts, columns are embedding spaces."""
