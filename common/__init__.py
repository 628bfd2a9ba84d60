"""What the commands share: errors in one line, files that are complete or absent, a text to try models on."""
