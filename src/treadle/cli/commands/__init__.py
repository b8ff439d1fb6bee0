"""One file a command. A new one is a file here and a line in `treadle.cli.app`."""
