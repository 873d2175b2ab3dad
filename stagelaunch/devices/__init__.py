"""Accelerator memory behind one protocol: a real CUDA device, or a simulated one with real limits."""
