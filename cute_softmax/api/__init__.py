"""What users call: the public functions, what they mean, and the checks of their arguments."""
