"""What crosses Treadle's sockets: typed messages in frames of limited size, between processes of one user."""
