"""The documentation site, see `conf.py`."""
