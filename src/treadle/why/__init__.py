"""Why a measured run is slow: simulated again with one thing after the other made ordinary."""
