"""What `python -m tests.faults` provokes: one room a part of the product, one function a fault."""
