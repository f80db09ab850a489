"""The folder that begins the PYTHONPATH of programs started with `--as_accelerate`; see its `accelerate.py`."""
