"""Figures of the CUDA backend; run `python -m tests.bench_gpu`."""
