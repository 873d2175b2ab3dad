"""A checkpoint from its files to filled parameters: read the headers, check them, plan the reads, read.

Everything but ``reader`` is free of torch, so the supervisor checks a checkpoint before any worker starts.
"""
