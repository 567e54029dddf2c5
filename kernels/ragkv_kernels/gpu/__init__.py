"""The operations in Triton, one file each. Importing one imports Triton."""
