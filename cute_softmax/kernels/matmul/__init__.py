"""softmax(S) @ V and its gradient, on tensor cores."""
