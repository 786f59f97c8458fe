"""Findings, measurements, and recorded runs of whole machines."""
