"""What `scripts/faults.py` provokes: one room a part of the product, one function a fault."""
