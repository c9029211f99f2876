"""One file per sub-command: `parser()` declares the arguments, `run(args)` calls the library and prints."""
