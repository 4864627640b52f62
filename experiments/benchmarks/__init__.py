"""Benchmarks: each prints one JSON object on its last line, with the setting it was measured in."""
