"""Ways to fit a bigger model and to see the costs of a step; engines compose them, and each is off unless asked for."""
