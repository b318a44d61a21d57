"""Triton kernels, one family per file, each with a function that launches it.

Rules that hold for all of them: `_ptr` marks pointers and a comment gives their shapes, addresses
into the pool are int64, every load and store is masked where a tile can overhang, sums are
float32. `skip_ptr` points at an int32: when it is not 0, the kernel returns at once (a hit of the
Selection Cache, decided on the device).
"""
