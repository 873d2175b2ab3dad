"""What a stage runs: an engine builds, loads, profiles, captures and answers; the worker decides when."""
