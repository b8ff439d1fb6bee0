"""Messages between processes: frames, links, listeners, seals."""
