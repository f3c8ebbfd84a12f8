"""Benchmarks of posenc; the schemes come from its catalogue."""
