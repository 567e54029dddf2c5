"""Fast paths of single operations, one file each. Empty so far."""
