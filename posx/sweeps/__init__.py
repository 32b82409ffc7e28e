"""Sweeps: many runs from one config. `plan` says which, `processes` runs them, each as `posx train` of its own."""
