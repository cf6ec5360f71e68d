"""What kernels of all movements are made of."""
