"""What `benchmarks.bench` measures, one file per stage."""
