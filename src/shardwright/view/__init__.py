"""Pages: the frame and the style that they share. This package needs no torch."""
