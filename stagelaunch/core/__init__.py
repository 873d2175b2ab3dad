"""What decides. Nothing here reads a file, a clock or a device; time comes in as an argument."""
