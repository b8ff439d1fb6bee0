"""Published step times and memory: the rows as jobs, what a plan prints for them, and the fit of presets to them."""
