"""Factors of all logits of a query. Each composes with any encoding: rope + log_length."""
