"""Published step times and memory: the rows as jobs, and what a plan prints for them."""
