"""Numbers of rows, each from one read: reductions, statistics, log-probabilities of chosen elements."""
