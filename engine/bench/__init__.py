"""The benchmark: ours against peers in one run on one machine (docs/bench.md)."""
