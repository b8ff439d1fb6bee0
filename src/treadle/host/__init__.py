"""What this host tells: its processes, its sockets, its cores; and errors that travel between processes."""
