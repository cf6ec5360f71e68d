"""Rows that ranks share: the states of slices merged, and results made of a slice and whole rows' numbers."""
