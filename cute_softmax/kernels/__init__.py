"""CuTe DSL kernels: movements (how data reaches threads) times row maths (what is computed).

`const_expr` and `range_constexpr` stand in functions that `@cute.jit` or `@cute.kernel` decorates, where `if` and `for`
may be the GPU's. All other functions are plain Python that runs once, while the kernel is traced.
"""
