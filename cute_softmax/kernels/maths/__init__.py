"""What is computed of a row, and what happens to its scores before."""
