"""The column and split movements: rows that CTAs take in panels, chunks and parts."""
