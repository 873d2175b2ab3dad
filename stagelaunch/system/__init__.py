"""What acts on this machine outside the devices: locks, claims, processes. Decides nothing."""
