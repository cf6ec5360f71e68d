"""CuTe DSL kernels: movements (how data reaches threads) times row maths (what is computed)."""
