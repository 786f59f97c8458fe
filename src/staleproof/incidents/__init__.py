"""The incidents: the miniature each happens in, its faults, and the questions put to it."""
