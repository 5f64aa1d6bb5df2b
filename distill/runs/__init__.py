"""One run, many runs, and the commands built on them."""
