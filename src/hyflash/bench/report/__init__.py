"""`hyflash report`: result files as Markdown, plots and one HTML page (`make.py` is the way in)."""
