"""Benchmarks of savestream beside the libraries that people would use instead; see README.md in this directory."""
