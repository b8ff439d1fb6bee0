"""Who has which bytes of which tensor, who wants which, and the plan that moves them. Pure: no torch."""
