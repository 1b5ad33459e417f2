"""Property tests: what must hold for every conversation, checked against oracles that share no code with the package."""
