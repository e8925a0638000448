"""States of the optimizer outside the memory of the device: in a file on a disk."""
