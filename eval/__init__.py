"""Benchmarks for models with Attention Residuals, on lm-eval: the paper's table, local data, comparisons."""
