"""Benchmarks: a seeded corpus, adapters for other programs, the comparison (`make bench`), and a guard against regressions."""
