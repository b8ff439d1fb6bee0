"""The host: its processes, sockets and cores; and errors that can be sent between processes."""
