"""Biases: numbers added to the logits of pairs, whatever the tokens are."""
