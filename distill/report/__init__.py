"""Comparisons, tables, plots and HTML reports of runs."""
