"""A cache of what a teacher said: rows are distinct texts, columns are embedding spaces."""

__version__ = "0.1.0"
