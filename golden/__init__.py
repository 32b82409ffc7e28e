"""Golden test vectors of position encodings, for attention code in any library. It needs NumPy alone."""
