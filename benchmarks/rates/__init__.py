"""How often `treadle why` and `treadle hang` name what was injected."""
