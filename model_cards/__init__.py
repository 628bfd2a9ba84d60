"""Model cards: what a checkpoint is, how it was made, what it scores. Every figure is read from a file beside it."""
