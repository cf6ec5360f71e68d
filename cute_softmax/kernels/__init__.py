"""CuTe DSL kernels: movements (how data reaches threads) times row maths (what is computed).

`const_expr` and `range_constexpr` stand in functions that `@cute.jit` or `@cute.kernel` decorates, and mark what is
decided while a kernel is traced: any other `if`, and any other `for` over a range, runs on the GPU. Functions without a
decorator are plain Python.
"""
