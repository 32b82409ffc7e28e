"""Added to the token embeddings."""
