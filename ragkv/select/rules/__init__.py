"""The methods, one file each. A file defines ``METHOD``; its name is the method's name."""
