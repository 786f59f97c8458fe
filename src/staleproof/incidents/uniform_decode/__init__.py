"""Incident 8: a prompt as long as a draft replays the graph of decode."""
