"""The largest elements of rows with their probabilities, and the gradient of that."""
