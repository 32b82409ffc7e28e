"""Maps of single queries and keys, such that their products know the distance."""
