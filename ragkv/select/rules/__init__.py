"""The methods that recompute rows: each file defines ``METHOD``, of the file's name."""
