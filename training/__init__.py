"""Fine-tuning with PEFT, and seeing what depth attention learns: `python -m training --help`."""
