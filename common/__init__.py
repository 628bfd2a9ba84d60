"""What the commands share: errors in one line, files that are complete or absent, a text to try models on."""

import logging


# On processors with bf16 instructions bitsandbytes, which PEFT imports, warns that it lacks a kernel it can do without.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
