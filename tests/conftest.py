"""What all tests share."""

import signal

# A shell lets its background jobs ignore Ctrl-C, and the programs they start inherit that; some
# tests interrupt programs.
signal.signal(signal.SIGINT, signal.default_int_handler)
