"""Vectors by distance, which meet queries, keys and values."""
