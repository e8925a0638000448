"""States of the optimizer outside the memory of the device: in that of the host, or in a file on a disk."""
