"""softmax and log_softmax, plain and of scores."""
