"""softmax(S) @ V and its gradients."""
