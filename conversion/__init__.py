"""Porting checkpoints to Attention Residuals: `python -m conversion --help`."""
