"""What answers from reused chunks may get wrong: a file each, and what measures them."""
