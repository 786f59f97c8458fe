"""What a server calls: one operation a file, each with its contract in ``ops/reference``."""
