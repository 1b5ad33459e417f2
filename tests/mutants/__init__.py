"""Mutants: small wrong changes to the code that decides masks, each of which the tests must notice."""
