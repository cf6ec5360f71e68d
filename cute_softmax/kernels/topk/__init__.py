"""The largest elements of short rows, and what they give back."""
