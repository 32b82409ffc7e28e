"""The faults that `python -m tests.faults` provokes: one file a part of the product, one function a fault."""
