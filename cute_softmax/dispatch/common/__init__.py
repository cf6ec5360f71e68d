"""What the dispatch of all functions shares: torch's state, checks of arguments, what a call means, and its form."""
