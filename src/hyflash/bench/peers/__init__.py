"""Other engines for the same model, measured beside ours. See `base.py` for what each has to do."""
