"""The incidents: for each a miniature in which it happens, its faults, and the questions about it."""
