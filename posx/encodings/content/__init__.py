"""Positions that the tokens themselves decide on: gates, counts, learned functions of scores."""
