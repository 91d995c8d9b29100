"""Measurements, not tests: nothing here passes or fails by a time."""
